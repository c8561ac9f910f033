#!/usr/bin/env bash
# Sets up .venv, then lint, types and tests: what CI runs. Every stage runs, also after one that failed.
#
#   bash scripts/test.sh                # everything
#   bash scripts/test.sh tests/algo -x  # with arguments: only pytest, which gets them
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$REPO"
trap 'exit 130' INT # also where the command that was interrupted ended in its own way

start=$(now)
bash scripts/setup.sh

results=()
failed=0

# stage NAME COMMAND...: run it, note its seconds and whether it was red.
stage() {
    local name=$1 begun verdict=ok
    begun=$(now)
    shift
    say "$name ..."
    "$@" || { verdict="FAILED (exit code $?)" && failed=1; }
    results+=("$(printf '%-22s %8s s  %s' "$name" "$(seconds_since "$begun")" "$verdict")")
}

# count PATTERN: lines of our Python that silence a checker.
count() {
    { grep -rEh --include='*.py' "$1" slime_like plugins scripts tests train.py setup.py || true; } | wc -l
}

if (($# == 0)); then
    stage "ruff check" "$VENV/bin/ruff" check .
    stage "ruff format" "$VENV/bin/ruff" format --check .
    stage "basedpyright" "$VENV/bin/basedpyright"
    stage "import-linter" "$VENV/bin/lint-imports"
fi
stage "pytest" "$PYTHON" -m pytest "$@"

say "$(printf '%s\n' '' "${results[@]}")"
say "silenced: $(count '# *pyright: *ignore') pyright: ignore, $(count '# *type: *ignore') type: ignore, $(count '# *noqa') noqa"
say "total: $(seconds_since "$start") s$( ((failed == 0)) || printf ', with failures')"
exit "$failed"
