#!/usr/bin/env bash
# The steps of docker/Dockerfile, one per RUN line. scripts/image_root.py executes the Dockerfile without an image builder.
#
#   bash scripts/image_steps.sh system|dependencies|code    # SLIME_LIKE_DEVICE=cpu|gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

USER_ID=10001 # also in docker/Dockerfile
# git: for work inside the container. procps: used by Ray's and our reports of dead processes. gcc: kernels are compiled on the machine.
PACKAGES=(ca-certificates git procps)
CPU_PACKAGES=(gcc libc6-dev)
# build-essential and python3.12-dev: Triton compiles a small C module at first use.
# libnuma1, libibverbs1, rdma-core: engines pin memory to a NUMA node, and NCCL uses InfiniBand between nodes.
GPU_PACKAGES=(build-essential libibverbs1 libnuma1 python3.12 python3.12-dev python3.12-venv rdma-core)

# system: packages of the distribution, and the user that owns the code; as root.
system() {
    local -a packages=("${PACKAGES[@]}")
    if [[ ${SLIME_LIKE_DEVICE:?set it to cpu or gpu} == gpu ]]; then
        packages+=("${GPU_PACKAGES[@]}")
    else
        packages+=("${CPU_PACKAGES[@]}")
    fi
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
    rm -rf /var/lib/apt/lists/*
    groupadd --gid "$USER_ID" slime_like
    useradd --uid "$USER_ID" --gid "$USER_ID" --create-home --home-dir /home/slime_like --shell /bin/bash slime_like
    install -d -o "$USER_ID" -g "$USER_ID" /home/slime_like/.cache /home/slime_like/.cache/uv "$PWD" "$PWD/runs" "$PWD/scripts"
}

# dependencies: the packages of the lock file; as the user.
dependencies() {
    bash scripts/setup.sh --dependencies-only
}

# code: this package; as the user.
code() {
    bash scripts/setup.sh
}

case ${1:-} in
    system | dependencies | code) "$1" ;;
    *)
        sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
