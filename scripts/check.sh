#!/usr/bin/env bash
# Inner loop: lint, types of the files that differ from main, and the tests that are not slow and start no engine, no ranks and
# no train.py, with one more process than cores. scripts/test.sh runs everything.
#
#   bash scripts/check.sh                # everything
#   bash scripts/check.sh tests/algo -x  # arguments are passed to pytest
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/parts.sh"
source "$REPO/scripts/lib/stages.sh"
cd "$REPO"
trap 'exit 130' INT # even if the interrupted command exits differently

start=$(now)
bash scripts/setup.sh

# changed: print new and changed Python files relative to main (to the last commit if there is no main).
changed() {
    local base
    base=$(git merge-base HEAD main 2>/dev/null) || base=HEAD
    git diff --name-only --diff-filter=d "$base" -- '*.py'
    git ls-files --others --exclude-standard -- '*.py'
}

mapfile -t files < <(changed)
if ((${#files[@]} > 0)); then
    aside "basedpyright, ${#files[@]} files" "$VENV/bin/basedpyright" "${files[@]}"
fi
lint
# One thread per process, because every core has a process; one more process than cores, because some tests wait.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTEST_XDIST_AUTO_NUM_WORKERS=${PYTEST_XDIST_AUTO_NUM_WORKERS:-$(($(nproc) + 1))}
stage "pytest" "$PYTHON" -m pytest -q -n auto --maxprocesses 8 --dist loadscope --hypothesis-profile short \
    -m "${PARTS[unit]} and not slow" "$@"
((${#files[@]} == 0)) || join
summary "$start"
