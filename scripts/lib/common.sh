# Sourced by every script here: the repository's folder, messages, and the time each step took.
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV=$REPO/.venv
PYTHON=$VENV/bin/python
# Two lines: what .venv was made as (a change makes it anew), and what was installed into it (a change installs again).
STAMP=$VENV/.slime_like_setup

# A CPU environment has none of the kernels that CUDA needs, so with it no GPU may be seen.
if [[ ${SLIME_LIKE_DEVICE:-} == cpu ]]; then
    export CUDA_VISIBLE_DEVICES=
fi

# say TEXT...: a line that names the script.
say() {
    printf '%s: %s\n' "$(basename "$0" .sh)" "$*"
}

# fail TEXT...: the same on stderr, and the script ends with exit code 1.
fail() {
    say "$@" >&2
    exit 1
}

# now: microseconds since the epoch, with no process started.
now() {
    printf '%s' "${EPOCHREALTIME/[.,]/}"
}

# seconds_since MICROSECONDS: what has passed since then, as 12.3
seconds_since() {
    local tenths=$((($(now) - $1) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# step NAME COMMAND...: run the command; then say the name and its seconds, or fail with both.
step() {
    local name=$1 start
    start=$(now)
    shift
    say "$name ..."
    "$@" || fail "$name failed after $(seconds_since "$start") s; the messages above say why"
    say "$name: $(seconds_since "$start") s"
}
