#!/usr/bin/env bash
# The inner loop: lint, types of the files that differ from main, and the tests that start no engine, no ranks and no train.py,
# a process per core. scripts/test.sh has the rest.
#
#   bash scripts/check.sh                # everything
#   bash scripts/check.sh tests/algo -x  # with arguments: they go to pytest
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/parts.sh"
source "$REPO/scripts/lib/stages.sh"
cd "$REPO"
trap 'exit 130' INT # also where the command that was interrupted ended in its own way

start=$(now)
bash scripts/setup.sh

# changed: Python files that differ from main (from the last commit, where there is no main), new ones included.
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
stage "ruff check" "$VENV/bin/ruff" check .
stage "ruff format" "$VENV/bin/ruff" format --check .
stage "import-linter" "$VENV/bin/lint-imports"
# One thread each: there is a process per core already.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stage "pytest" "$PYTHON" -m pytest -q -n auto --maxprocesses 8 --dist loadfile -m "${PARTS[unit]} and not slow" "$@"
((${#files[@]} == 0)) || join
summary "$start"
