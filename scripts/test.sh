#!/usr/bin/env bash
# Set up .venv, then run lint, types and tests, as CI does. Every stage runs, even after a failure.
#
#   bash scripts/test.sh                # everything
#   bash scripts/test.sh --part unit    # one part: static, unit, engine, ranks, e2e or gpu
#   bash scripts/test.sh tests/algo -x  # other arguments: run only pytest, with these arguments
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/parts.sh"
source "$REPO/scripts/lib/stages.sh"
cd "$REPO"
trap 'exit 130' INT # even if the interrupted command exits differently

if [[ ${1:-} == --part ]]; then
    [[ $# == 2 && (${2:-} == static || -v PARTS[${2:-}]) ]] ||
        fail "--part ${*:2}: give one of static, unit, engine, ranks, e2e, gpu, and nothing else"
fi
start=$(now)
bash scripts/setup.sh

# count PATTERN: count lines of Python that match.
count() {
    { grep -rEh --include='*.py' "$1" slime_like slime_like_compat plugins scripts benchmarks examples tests train.py setup.py || true; } | wc -l
}

# silenced: print the number of silenced checks of each kind.
silenced() {
    say "silenced: $(count '# *pyright: *ignore') pyright: ignore, $(count '# *type: *ignore') type: ignore, $(count '# *noqa') noqa"
}

if [[ ${1:-} == --part && $2 == static ]]; then
    static
    silenced
elif [[ ${1:-} == --part ]]; then
    stage "pytest, part $2" parallel_pytest -m "${PARTS[$2]}"
elif (($# > 0)); then
    stage "pytest" "$PYTHON" -m pytest "$@"
else
    aside "basedpyright" "$VENV/bin/basedpyright"
    stage "pytest" parallel_pytest
    lint
    join
    silenced
fi
summary "$start"
