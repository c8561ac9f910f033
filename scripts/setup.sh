#!/usr/bin/env bash
# Create .venv from the lock file of this machine's device, unless it is up to date. Called by other scripts.
#
#   bash scripts/setup.sh                        # SLIME_LIKE_DEVICE=cpu|gpu overrides the detection by nvidia-smi
#   bash scripts/setup.sh --dependencies-only    # without this package: a layer of a Docker image
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/platform.sh"
source "$REPO/scripts/lib/find_python.sh"
source "$REPO/scripts/lib/package_index.sh"
cd "$REPO"
trap 'exit 130' INT # even if the interrupted command exits differently

# This file exists during installation: a package left incomplete by an interrupted set-up would otherwise count as installed.
INCOMPLETE=$VENV/.slime_like_half_made
# Names of the distributions whose bytecode has been compiled.
COMPILED=$VENV/.slime_like_compiled
# Files that are not compiled ahead: tests of other packages, and packages that runs rarely import.
NOT_COMPILED='site-packages/((.*/)?tests?|transformers/models|modelscope|sglang/multimodal_gen|torch/testing/_internal'
NOT_COMPILED+='|ray/(rllib|data|serve|tune|train)|pandas|numba|anthropic|timm|wandb|networkx|Cryptodome|datasets)/'
# fla's kernels for tests on a CPU, in a folder that only those tests have on their path.
TEST_KERNELS=scripts/requirements/fla_interpreter.lock
declare -A NEED_GB=([cpu]=9 [gpu]=14)

# Variables of the caller that would make an installer write outside .venv.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV UV_SYSTEM_PYTHON
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

# identity: print device, Python and path of the environment. Console scripts contain absolute paths.
identity() {
    printf '%s %s %s' "$DEVICE" "$("$PYTHON" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null)" "$VENV"
}

# contents: print a hash of the requirements.
contents() {
    cat "$LOCK" "$TEST_KERNELS" setup.py | sha256sum | cut -d ' ' -f 1
}

# wait_for_turn: allow one set-up at a time per checkout; the lock is released when this process ends.
wait_for_turn() {
    type -P flock >/dev/null || return 0
    exec 9<"$REPO/scripts/setup.sh"
    flock --nonblock 9 && return
    say "another set-up of $REPO is running; waiting for it"
    flock --timeout 1800 9 || fail "the other set-up has held $REPO for 30 minutes: end it, then run this again"
}

is_done() {
    [[ -f $STAMP && $(<"$STAMP") == "$(identity)"$'\n'"$(contents)" ]]
}

# keep_or_drop_venv: remove an environment of another kind or an incomplete one; keep one created by hand.
keep_or_drop_venv() {
    [[ -e $VENV ]] || return 0
    [[ -f $VENV/pyvenv.cfg ]] || fail "$VENV exists and is not a virtual environment: move it away"
    if [[ -f $INCOMPLETE ]]; then
        say "an interrupted set-up left $VENV incomplete: creating it again"
    elif [[ -f $STAMP && $(head -n 1 "$STAMP") == "$(identity)" ]]; then
        return
    elif [[ ! -f $STAMP ]] && "$PYTHON" -c "$PYTHON_TEST" >/dev/null 2>&1; then
        return
    else
        say "$VENV was created for another device, Python or path: creating it again"
    fi
    rm -rf "$VENV/bin" "$VENV/lib" # in this order an interrupted removal leaves an environment that is recognised as incomplete
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

# uv_install ARGUMENTS...: show uv's progress bars on a terminal; in a log, lines of the largest packages only.
uv_install() {
    local -a install=("$VENV/bin/uv" pip install --python "$PYTHON" --no-deps)
    if [[ -t 2 ]]; then
        "${install[@]}" "$@"
    else
        "${install[@]}" "$@" 2>&1 | { grep -Ev '^ [-+~] |^ Downloaded|^Downloading .*\([0-9]{1,2}\.' || true; }
    fi
}

install_locked() {
    touch "$INCOMPLETE"
    uv_install --require-hashes -r "$LOCK" || return
    rm "$INCOMPLETE"
}

install_test_kernels() {
    rm -rf "$VENV/fla_interpreter"
    uv_install --require-hashes -r "$TEST_KERNELS" --target "$VENV/fla_interpreter"
}

# setuptools comes from the lock; an isolated build environment would fetch the newest version.
install_package() {
    uv_install --no-build-isolation -e .
}

# compile_all: compile the installed packages to .pyc files. uv creates none, and without them importing SGLang takes 19 s instead
# of 8. Some packages contain templates that are not Python; their errors are ignored. NOT_COMPILED is 37% of the bytecode, of which
# a run imports little or nothing; Python compiles those files when it imports them. Reading all files takes 20 s, so nothing is
# compiled if the installed packages are those of the last time, or with SLIME_LIKE_BYTECODE=off, for an environment that runs a
# few commands only.
compile_all() {
    [[ ${SLIME_LIKE_BYTECODE:-} != off ]] || return 0
    local packages distributions
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
    distributions=$(cd "$packages" && compgen -G '*.dist-info')
    [[ ! -f $COMPILED || $(<"$COMPILED") != "$distributions" ]] || return 0
    "$PYTHON" -m compileall -q -j 0 -x "$NOT_COMPILED" "$packages" >/dev/null 2>&1 || true
    printf '%s\n' "$distributions" >"$COMPILED"
}

# compile_kernels: compile the decode kernels of CPU engines. Without a compiler torch's kernels are used.
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
    [[ -d $VENV ]] || step "creating $VENV" make_venv
    identity >"$STAMP"
    step "installing uv" install_uv
    use_pip_settings
    step "installing $(grep -c '==' "$LOCK") locked packages" install_locked
    [[ $# == 1 ]] || step "installing slime_like" install_package
    [[ $# == 1 || $DEVICE != cpu ]] || step "installing kernels for tests" install_test_kernels
    step "compiling bytecode of new packages (minutes, without output)" compile_all
    [[ $# == 1 || $DEVICE != cpu ]] || step "compiling CPU kernels" compile_kernels
    [[ $# == 1 ]] || printf '%s\n%s\n' "$(identity)" "$(contents)" >"$STAMP"
    say "done: $(seconds_since "$start") s"
}

main "$@"
