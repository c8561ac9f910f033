#!/usr/bin/env bash
# Makes .venv from the lock file of this machine's device; does nothing if that was done before. Other scripts call it.
#
#   bash scripts/setup.sh                        # SLIME_LIKE_DEVICE=cpu|gpu overrides what nvidia-smi says
#   bash scripts/setup.sh --dependencies-only    # all but this package: a layer of a Docker image
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/platform.sh"
source "$REPO/scripts/lib/find_python.sh"
source "$REPO/scripts/lib/package_index.sh"
cd "$REPO"
trap 'exit 130' INT # also where the command that was interrupted ended in its own way

# There while packages are installed: one that an interrupted set-up left half written would pass for installed.
HALF_MADE=$VENV/.slime_like_half_made
# fla's kernels for tests on a CPU, in a folder that nothing but those tests has on its path.
TEST_KERNELS=scripts/requirements/fla_interpreter.lock
declare -A NEED_GB=([cpu]=9 [gpu]=14)

# What a caller's shell may hold that would send an installer elsewhere than into .venv.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV UV_SYSTEM_PYTHON
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

# identity: of the environment itself. A moved checkout is another one, since console scripts hold absolute paths.
identity() {
    printf '%s %s %s' "$DEVICE" "$("$PYTHON" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null)" "$VENV"
}

# contents: of what is installed.
contents() {
    cat "$LOCK" "$TEST_KERNELS" setup.py | sha256sum | cut -d ' ' -f 1
}

# wait_for_turn: one set-up at a time per checkout; the lock goes when this process ends, however it ends.
wait_for_turn() {
    type -P flock >/dev/null || return 0
    exec 9<"$REPO/scripts/setup.sh"
    flock --nonblock 9 && return
    say "another set-up of $REPO is at work; waiting for it"
    flock --timeout 1800 9 || fail "the other set-up has held $REPO for 30 minutes: end it, then run this again"
}

is_done() {
    [[ -f $STAMP && $(<"$STAMP") == "$(identity)"$'\n'"$(contents)" ]]
}

# keep_or_drop_venv: an environment of another kind, or half made, is removed; one that was made by hand is kept.
keep_or_drop_venv() {
    [[ -e $VENV ]] || return 0
    [[ -f $VENV/pyvenv.cfg ]] || fail "$VENV is there and is no virtual environment: move it away"
    if [[ -f $HALF_MADE ]]; then
        say "an interrupted set-up left $VENV half made: making it anew"
    elif [[ -f $STAMP && $(head -n 1 "$STAMP") == "$(identity)" ]]; then
        return
    elif [[ ! -f $STAMP ]] && "$PYTHON" -c "$PYTHON_TEST" >/dev/null 2>&1; then
        return
    else
        say "$VENV was made for another device, Python or place: making it anew"
    fi
    rm -rf "$VENV/bin" "$VENV/lib" # in this order an interrupted removal is still known for an environment, and unfit
    rm -rf "$VENV"
}

make_venv() {
    check_disk "$VENV" "${NEED_GB[$DEVICE]}"
    check_disk "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/uv}" "${NEED_GB[$DEVICE]}"
    local python
    python=$(find_python) || return
    say "Python 3.12: $python"
    "$python" -m venv "$VENV"
}

install_uv() {
    [[ ! -x $VENV/bin/uv ]] || return 0
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --upgrade || return
    "$PYTHON" -m pip install --quiet uv
}

# uv_install ARGUMENTS...: a terminal gets uv's progress bars; a log is spared the lines per package, the largest excepted.
uv_install() {
    local -a install=("$VENV/bin/uv" pip install --python "$PYTHON" --no-deps)
    if [[ -t 2 ]]; then
        "${install[@]}" "$@"
    else
        "${install[@]}" "$@" 2>&1 | { grep -Ev '^ [-+~] |^ Downloaded|^Downloading .*\([0-9]{1,2}\.' || true; }
    fi
}

install_locked() {
    touch "$HALF_MADE"
    uv_install --require-hashes -r "$LOCK" || return
    rm "$HALF_MADE"
}

install_test_kernels() {
    rm -rf "$VENV/fla_interpreter"
    uv_install --require-hashes -r "$TEST_KERNELS" --target "$VENV/fla_interpreter"
}

# setuptools comes from the lock: a build environment of its own would fetch the newest one.
install_package() {
    uv_install --no-build-isolation -e .
}

# compile_all: uv leaves no .pyc, and without them importing SGLang takes 19 s instead of 8. Some packages carry
# templates that are no Python; what they say is noise. Tests of other packages never run here.
compile_all() {
    "$PYTHON" -m compileall -q -j 0 -x '/tests?/' "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
        >/dev/null 2>&1 || true
}

# compile_kernels: engines on a CPU decode with them. Without a compiler torch's kernels serve; that is no failure.
compile_kernels() {
    (cd "$REPO" && "$PYTHON" -m slime_like_plugins.sglang_cpu.build) || true
}

main() {
    local start
    start=$(now)
    [[ $# == 0 || ($# == 1 && $1 == --dependencies-only) ]] || fail "unknown arguments $*: --dependencies-only or none"
    DEVICE=$(choose_device)
    LOCK=scripts/requirements/$DEVICE.lock
    wait_for_turn
    if is_done; then
        say ".venv is up to date ($DEVICE): $(seconds_since "$start") s"
        return
    fi
    check_platform
    say "device: $DEVICE, requirements: $LOCK"
    keep_or_drop_venv
    [[ -d $VENV ]] || step "making $VENV" make_venv
    identity >"$STAMP"
    step "installing uv" install_uv
    use_pip_settings
    step "installing $(grep -c '==' "$LOCK") locked packages" install_locked
    [[ $# == 1 ]] || step "installing slime_like" install_package
    [[ $# == 1 || $DEVICE != cpu ]] || step "installing kernels for tests" install_test_kernels
    step "compiling bytecode" compile_all
    [[ $# == 1 || $DEVICE != cpu ]] || step "compiling CPU kernels" compile_kernels
    [[ $# == 1 ]] || printf '%s\n%s\n' "$(identity)" "$(contents)" >"$STAMP"
    say "done: $(seconds_since "$start") s"
}

main "$@"
