#!/usr/bin/env bash
# Install the newest version of an upstream package into .venv, pre-releases included, and run the tests marked upstream:
# failures name the hooks and patches that do not fit that version. The next set-up creates .venv from the lock again.
#
#   bash scripts/next_upstream.sh sglang    # or megatron-core, torch
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source "$REPO/scripts/lib/package_index.sh"
cd "$REPO"

case ${1:-} in
    sglang | megatron-core) packages=("$1") ;;
    torch) packages=(torch torchvision) ;; # each torchvision is built for one version of torch
    *) fail "unknown package '${1:-}': give sglang, megatron-core or torch" ;;
esac

# version: print the version of the package in .venv.
version() {
    "$PYTHON" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "${packages[0]}"
}

# install_next: install the newest versions. A pre-release in the bound makes uv accept pre-releases of these packages only.
install_next() {
    local package
    local -a install=("$VENV/bin/uv" pip install --python "$PYTHON" --overrides scripts/requirements/cpu.overrides)
    for package in "${packages[@]}"; do
        install+=(--upgrade-package "$package" "$package>=0a0")
    done
    "${install[@]}"
}

SLIME_LIKE_DEVICE=cpu bash scripts/setup.sh
use_pip_settings
locked=$(version) stamp=$(<"$STAMP")
echo "made with the next $1" >"$STAMP"
step "installing the next $1" install_next
next=$(version)
if [[ $next == "$locked" ]]; then
    printf '%s\n' "$stamp" >"$STAMP"
    say "the index has no $1 after $locked"
    exit
fi
say "$1 $locked -> $next"
"$PYTHON" -m pytest -m upstream || fail "hooks or patches do not fit $1 $next: the failures above name them"
say "every hook and patch fits $1 $next"
