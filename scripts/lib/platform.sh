# Sourced: refuse machines on which the wheels cannot run, before downloading anything.

MIN_GLIBC=2.34 # megatron-core and SGLang publish manylinux_2_34 wheels for x86-64 only

# Properties of the machine; tests replace these.
probe_kernel() { uname -s; }
probe_machine() { uname -m; }
probe_glibc() { getconf GNU_LIBC_VERSION 2>/dev/null || true; } # "glibc 2.36"; nothing on musl
probe_free_gb() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'; }
probe_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# check_platform: return on Linux x86-64 with a recent glibc, else fail with the platform and an alternative.
check_platform() {
    local kernel machine glibc
    local elsewhere="use WSL2 on Windows, or the CPU image on any machine with Docker (docker/README.md)"
    kernel=$(probe_kernel) machine=$(probe_machine)
    if [[ $kernel != Linux || $machine != x86_64 ]]; then
        fail "this is $kernel on $machine, and the wheels of megatron-core and SGLang need Linux on x86_64: $elsewhere"
    fi
    glibc=$(probe_glibc)
    glibc=${glibc#glibc }
    if [[ -z $glibc ]]; then
        fail "no glibc found (musl?), and the wheels need glibc >= $MIN_GLIBC (Ubuntu 22.04, Debian 12): $elsewhere"
    fi
    if [[ $(printf '%s\n' "$MIN_GLIBC" "$glibc" | sort -V | head -n 1) != "$MIN_GLIBC" ]]; then
        fail "glibc here is $glibc, and the wheels need >= $MIN_GLIBC (Ubuntu 22.04, Debian 12): upgrade, or $elsewhere"
    fi
}

# check_disk FOLDER GB: fail if the file system of FOLDER (or of its nearest existing parent) has less free space.
check_disk() {
    local folder=$1 need=$2 free
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    free=$(probe_free_gb "$folder")
    if ((free < need)); then
        fail "$free GB free on the disk of $1, set-up needs about $need GB: free some, or clone to a larger disk" \
            "(downloads go to UV_CACHE_DIR, else \$XDG_CACHE_HOME/uv, else ~/.cache/uv)"
    fi
}

# choose_device: print cpu or gpu, from SLIME_LIKE_DEVICE or the presence of an NVIDIA driver.
choose_device() {
    case ${SLIME_LIKE_DEVICE:-} in
        cpu | gpu) echo "$SLIME_LIKE_DEVICE" ;;
        '') if probe_gpu; then echo gpu; else echo cpu; fi ;;
        *) fail "SLIME_LIKE_DEVICE=$SLIME_LIKE_DEVICE: give cpu or gpu, or leave it unset to let nvidia-smi decide" ;;
    esac
}
