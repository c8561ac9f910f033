# Sourced: stages of a script, which all run even after a failure, and a summary.

results=()
failed=0
unset PYTHONDONTWRITEBYTECODE # each process of the tests would compile the project's files again

# note NAME SECONDS CODE: add a line to the summary.
note() {
    local verdict=ok
    (($3 == 0)) || { verdict="FAILED (exit code $3)" && failed=1; }
    results+=("$(printf '%-28s %8s s  %s' "$1" "$2" "$verdict")")
}

# stage NAME COMMAND...: run it and note its seconds and result.
stage() {
    local name=$1 start code=0
    start=$(now)
    shift
    say "$name ..."
    "$@" || code=$?
    note "$name" "$(seconds_since "$start")" "$code"
}

# aside NAME COMMAND...: start it in the background; its output is printed by join.
aside() {
    aside_name=$1 aside_start=$(now) aside_output=$(mktemp)
    shift
    say "$aside_name, in the background ..."
    env --default-signal=INT "$@" >"$aside_output" 2>&1 & # bash would make it ignore SIGINT
    aside_pid=$!
    trap 'kill -INT "$aside_pid" 2>/dev/null || true; wait "$aside_pid" || true; rm -f "$aside_output"' EXIT
}

# join: wait for the command started by aside, print its output, note it.
join() {
    local code=0
    wait "$aside_pid" || code=$?
    trap 'rm -f "$aside_output"' EXIT
    say "$aside_name:"
    cat "$aside_output"
    note "$aside_name" "$(($(stat -c %Y "$aside_output") - aside_start / 1000000))" "$code" # time of its last line of output
}

# lint: checks of less than a second each.
lint() {
    stage "ruff check" "$VENV/bin/ruff" check .
    stage "ruff format" "$VENV/bin/ruff" format --check .
    stage "import-linter" "$VENV/bin/lint-imports"
}

# static: checks that do not run the code.
static() {
    lint
    stage "basedpyright" "$VENV/bin/basedpyright"
}

# parallel_pytest ARG...: run pytest in one process more than there are cores, because tests often wait for a peer or a deadline.
# tests/groups.py decides which tests share a process. Deadlines are scaled, because a process has less than a core.
parallel_pytest() {
    local processes=$(($(nproc) + 1))
    SLIME_LIKE_DEADLINE_FACTOR=${SLIME_LIKE_DEADLINE_FACTOR:-3} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
        "$PYTHON" -m pytest -n "$((processes < 8 ? processes : 8))" --dist loadscope --no-loadscope-reorder "$@"
}

# summary START: print the noted lines and the seconds since START; exit with 1 if a stage failed.
summary() {
    say "$(printf '%s\n' '' "${results[@]}")"
    say "total: $(seconds_since "$1") s$( ((failed == 0)) || printf ', with failures')"
    exit "$failed"
}
