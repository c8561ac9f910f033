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

# note NAME SECONDS CODE: a line of the summary at the end.
note() {
    local verdict=ok
    (($3 == 0)) || { verdict="FAILED (exit code $3)" && failed=1; }
    results+=("$(printf '%-28s %8s s  %s' "$1" "$2" "$verdict")")
}

# stage NAME COMMAND...: run it, note its seconds and whether it was red.
stage() {
    local name=$1 begun code=0
    begun=$(now)
    shift
    say "$name ..."
    "$@" || code=$?
    note "$name" "$(seconds_since "$begun")" "$code"
}

# aside NAME COMMAND...: begin it beside what follows; its output is kept back until join.
aside() {
    aside_name=$1 aside_begun=$(now) aside_output=$(mktemp)
    shift
    say "$aside_name, in the background ..."
    env --default-signal=INT "$@" >"$aside_output" 2>&1 & # which bash would have it ignore
    aside_pid=$!
    trap 'kill -INT "$aside_pid" 2>/dev/null || true; wait "$aside_pid" || true; rm -f "$aside_output"' EXIT
}

# join: wait for what was begun aside, print its output, note it.
join() {
    local code=0
    wait "$aside_pid" || code=$?
    trap 'rm -f "$aside_output"' EXIT
    say "$aside_name:"
    cat "$aside_output"
    note "$aside_name" "$(($(stat -c %Y "$aside_output") - aside_begun / 1000000))" "$code" # to its last line
}

# count PATTERN: lines of our Python that silence a checker.
count() {
    { grep -rEh --include='*.py' "$1" slime_like plugins scripts tests train.py setup.py || true; } | wc -l
}

if (($# > 0)); then
    stage "pytest" "$PYTHON" -m pytest "$@"
else
    # Side by side: most tests keep one core busy. Each half then has less of the machine, and deadlines know it.
    export SLIME_LIKE_DEADLINE_FACTOR=${SLIME_LIKE_DEADLINE_FACTOR:-2}
    aside "pytest, all but tests/e2e" "$PYTHON" -m pytest --ignore=tests/e2e
    stage "ruff check" "$VENV/bin/ruff" check .
    stage "ruff format" "$VENV/bin/ruff" format --check .
    stage "basedpyright" "$VENV/bin/basedpyright"
    stage "import-linter" "$VENV/bin/lint-imports"
    stage "pytest tests/e2e" "$PYTHON" -m pytest tests/e2e
    join
fi

say "$(printf '%s\n' '' "${results[@]}")"
say "silenced: $(count '# *pyright: *ignore') pyright: ignore, $(count '# *type: *ignore') type: ignore, $(count '# *noqa') noqa"
say "total: $(seconds_since "$start") s$( ((failed == 0)) || printf ', with failures')"
exit "$failed"
