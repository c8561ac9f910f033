#!/usr/bin/env bash
# Resolve scripts/requirements/*.in into cpu.lock, gpu.lock, fla_interpreter.lock and docs.lock. Commit them together.
#
#   bash scripts/lock.sh             # keeps the versions of the current locks if the *.in files allow them
#   bash scripts/lock.sh --upgrade   # uses the newest versions; or --upgrade-package NAME
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/package_index.sh"
source "$REPO/scripts/lib/find_python.sh"
cd "$REPO"

scratch=
trap '[[ -z $scratch ]] || rm -rf "$scratch"' EXIT

# setup.sh is not called, because it needs correct locks.
if [[ ! -x $VENV/bin/uv ]]; then
    scratch=$(mktemp -d)
    VENV=$scratch/venv PYTHON=$scratch/venv/bin/python
    "$(find_python)" -m venv "$VENV"
    "$PYTHON" -m pip install --quiet uv
fi
use_pip_settings

# compile LOCK ARGUMENTS...: resolve the requirements that ARGUMENTS name into scripts/requirements/LOCK.
compile() {
    local lock=$1
    shift
    "$VENV/bin/uv" pip compile "$@" --quiet \
        --python-version 3.12 --python-platform x86_64-manylinux_2_34 --generate-hashes \
        --custom-compile-command "bash scripts/lock.sh" -o "scripts/requirements/$lock"
}

IN=scripts/requirements
step "cpu.lock" compile cpu.lock $IN/runtime.in $IN/dev.in --override $IN/cpu.overrides "$@"
step "fla_interpreter.lock" compile fla_interpreter.lock $IN/fla_interpreter.in --no-deps "$@"
step "gpu.lock" compile gpu.lock $IN/runtime.in $IN/gpu.in $IN/dev.in "$@"
step "docs.lock" compile docs.lock $IN/docs.in "$@"
