#!/usr/bin/env bash
# Sets up .venv, then lint, types and tests: what CI runs. Every stage runs, also after one that failed.
#
#   bash scripts/test.sh                # everything
#   bash scripts/test.sh --part unit    # one part: static, unit, engine, ranks, e2e or gpu
#   bash scripts/test.sh tests/algo -x  # with other arguments: only pytest, which gets them
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/parts.sh"
source "$REPO/scripts/lib/stages.sh"
cd "$REPO"
trap 'exit 130' INT # also where the command that was interrupted ended in its own way

if [[ ${1:-} == --part ]]; then
    [[ $# == 2 && (${2:-} == static || -v PARTS[${2:-}]) ]] ||
        fail "--part ${*:2}: give one of static, unit, engine, ranks, e2e, gpu, and nothing else"
fi
start=$(now)
bash scripts/setup.sh

# count PATTERN: lines of our Python that silence a checker.
count() {
    { grep -rEh --include='*.py' "$1" slime_like plugins scripts tests train.py setup.py || true; } | wc -l
}

# silenced: how many there are of each kind.
silenced() {
    say "silenced: $(count '# *pyright: *ignore') pyright: ignore, $(count '# *type: *ignore') type: ignore, $(count '# *noqa') noqa"
}

if [[ ${1:-} == --part && $2 == static ]]; then
    static
    silenced
elif [[ ${1:-} == --part ]]; then
    stage "pytest, part $2" "$PYTHON" -m pytest -m "${PARTS[$2]}"
elif (($# > 0)); then
    stage "pytest" "$PYTHON" -m pytest "$@"
else
    # Side by side: most tests keep one core busy. Each half then has less of the machine, and deadlines know it.
    export SLIME_LIKE_DEADLINE_FACTOR=${SLIME_LIKE_DEADLINE_FACTOR:-2}
    aside "pytest, all but tests/e2e" "$PYTHON" -m pytest --ignore=tests/e2e
    static
    stage "pytest tests/e2e" "$PYTHON" -m pytest tests/e2e
    join
    silenced
fi
summary "$start"
