# Sourced by every script: the repository's folder, messages, and timing of steps.
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV=$REPO/.venv
PYTHON=$VENV/bin/python
# Two lines: identity of .venv (a change creates it again) and its contents (a change installs again).
STAMP=$VENV/.slime_like_setup

# A CPU environment has no CUDA kernels, so GPUs are hidden from it.
if [[ ${SLIME_LIKE_DEVICE:-} == cpu ]]; then
    export CUDA_VISIBLE_DEVICES=
fi

# say TEXT...: print a line with the script's name.
say() {
    printf '%s: %s\n' "$(basename "$0" .sh)" "$*"
}

# fail TEXT...: print the line on stderr and exit with code 1.
fail() {
    say "$@" >&2
    exit 1
}

# now: print microseconds since the epoch, without starting a process.
now() {
    printf '%s' "${EPOCHREALTIME/[.,]/}"
}

# seconds_since MICROSECONDS: print the seconds since then, as 12.3
seconds_since() {
    local tenths=$((($(now) - $1) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# step NAME COMMAND...: run the command; print its name and seconds, or fail with both.
step() {
    local name=$1 start
    start=$(now)
    shift
    say "$name ..."
    "$@" || fail "$name failed after $(seconds_since "$start") s; the messages above say why"
    say "$name: $(seconds_since "$start") s"
}
