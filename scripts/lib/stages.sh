# Sourced: stages of a script that all run, also after one that failed, and the summary at its end.

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

# static: everything that reads the code and runs none of it.
static() {
    stage "ruff check" "$VENV/bin/ruff" check .
    stage "ruff format" "$VENV/bin/ruff" format --check .
    stage "basedpyright" "$VENV/bin/basedpyright"
    stage "import-linter" "$VENV/bin/lint-imports"
}

# summary BEGUN: the noted lines and the seconds since BEGUN, on stdout; the script ends with 1 if one was red.
summary() {
    say "$(printf '%s\n' '' "${results[@]}")"
    say "total: $(seconds_since "$1") s$( ((failed == 0)) || printf ', with failures')"
    exit "$failed"
}
