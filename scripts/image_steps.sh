#!/usr/bin/env bash
# The steps of docker/Dockerfile, one per RUN line, and a run of all of them in a clean root without an image builder.
#
#   bash scripts/image_steps.sh system|dependencies|code    # one step, as in the image; SLIME_LIKE_DEVICE=cpu|gpu
#   bash scripts/image_steps.sh root FOLDER [PYTHON]        # all steps in FOLDER, a Debian or Ubuntu root (debootstrap), as root;
#                                                           # PYTHON: prefix of a Python 3.12, if the root's packages have none
#   bash scripts/image_steps.sh root-system FOLDER          # only the step system in FOLDER
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

# root FOLDER [PYTHON]: copy what the Dockerfile copies, and run the steps with chroot, as the users that the Dockerfile names.
root() {
    local folder=$1 prefix=${2:-}
    check_root "$folder"
    mountpoint -q "$folder/proc" || mount -t proc proc "$folder/proc"
    PROC=$folder/proc
    trap 'umount "$PROC"' EXIT
    [[ -z $prefix ]] || cp -a "$prefix/." "$folder/usr/local/"
    chroot "$folder" /sbin/ldconfig # PYTHON may have shared libraries
    root_system "$folder"
    git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --owner="$USER_ID" --group="$USER_ID" \
        | tar --extract --directory="$folder/slime_like"
    in_root "$folder" "$USER_ID" dependencies
    in_root "$folder" "$USER_ID" code
    chroot --userspec="$USER_ID:$USER_ID" "$folder" /usr/bin/env HOME=/home/slime_like SLIME_LIKE_DEVICE="$SLIME_LIKE_DEVICE" \
        bash /slime_like/docker/entrypoint.sh /slime_like/.venv/bin/python /slime_like/train.py +recipe=quickstart --plan
}

check_root() {
    [[ -x $1/usr/bin/apt-get ]] || { echo "image_steps: $1 is no Debian or Ubuntu root: create it with debootstrap" >&2; exit 2; }
}

# root_system FOLDER: run the step system, then copy this machine's certificates, which a proxy may need, over the root's.
root_system() {
    local folder=$1 name
    check_root "$folder"
    [[ -c $folder/dev/urandom ]] || mknod -m 666 "$folder/dev/urandom" c 1 9
    install -d -m 1777 "$folder/dev/shm" # for the semaphores of compileall
    cp /etc/resolv.conf "$folder/etc/resolv.conf"
    install -d "$folder/slime_like/scripts"
    cp scripts/image_steps.sh "$folder/slime_like/scripts/"
    in_root "$folder" 0 system
    for name in PIP_CERT SSL_CERT_FILE; do
        [[ ! -f ${!name:-} ]] || install -D -m 644 "${!name}" "$folder${!name}"
    done
}

# in_root FOLDER UID STEP: run a step with the environment of the image and pip's settings of this machine.
in_root() {
    local name
    local -a settings=()
    for name in PIP_CERT PIP_INDEX_URL PIP_EXTRA_INDEX_URL SSL_CERT_FILE HTTPS_PROXY https_proxy; do
        [[ -z ${!name:-} ]] || settings+=("$name=${!name}")
    done
    echo "== step $3 as user $2"
    chroot --userspec="$2:$2" "$1" /usr/bin/env -i PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
        HOME=/home/slime_like LANG=C.UTF-8 UV_LINK_MODE=copy SLIME_LIKE_DEVICE="$SLIME_LIKE_DEVICE" "${settings[@]}" \
        bash /slime_like/scripts/image_steps.sh "$3"
}

case ${1:-} in
    system | dependencies | code) "$1" ;;
    root) SLIME_LIKE_DEVICE=${SLIME_LIKE_DEVICE:-cpu} root "${2:?give the folder of the root}" "${3:-}" ;;
    root-system) SLIME_LIKE_DEVICE=${SLIME_LIKE_DEVICE:-cpu} root_system "${2:?give the folder of the root}" ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
