"""Doctor's checks of the machine: system, devices, storage, limits, network."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_like.cluster.plan.machine import cpu_count, memory_bytes, probe_machine
from slime_like.cluster.start.doctor_finding import DoctorFinding, Level
from slime_like.cluster.start.limits import limits_too_low
from slime_like.util.counted import counted
from slime_like.util.gpus import installed_gpus

GIB = 2**30
MIN_GLIBC = (2, 34)


def check_system() -> Iterator[DoctorFinding]:
    """Check Python, platform, libc and C++ compiler."""
    version = platform.python_version()
    is_ok = sys.version_info[:2] == (3, 12)
    yield DoctorFinding(
        Level.OK if is_ok else Level.MISSING,
        "python",
        f"{version} ({sys.executable})",
        "" if is_ok else "install Python 3.12 and run scripts/quickstart.sh again",
    )
    system = f"{platform.system()} {platform.machine()}"
    is_ok = system == "Linux x86_64"
    yield DoctorFinding(
        Level.OK if is_ok else Level.MISSING,
        "platform",
        f"{system}, kernel {platform.release()}",
        "" if is_ok else "use Linux on x86-64: WSL2 on Windows, the CPU image of docker/ elsewhere",
    )
    libc, number = platform.libc_ver()
    is_ok = libc == "glibc" and tuple(int(part) for part in number.split(".")[:2]) >= MIN_GLIBC
    yield DoctorFinding(
        Level.OK if is_ok else Level.MISSING,
        "libc",
        f"{libc or 'unknown'} {number}",
        "" if is_ok else "SGLang's wheel needs glibc 2.34: Ubuntu 22.04, Debian 12, RHEL 9 or newer",
    )
    compiler = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    yield DoctorFinding(
        Level.OK if compiler else Level.WARNING,
        "compiler",
        compiler or "no C++ compiler",
        "" if compiler else "apt-get install g++ (only torch.compile and GPU kernels that build on first use need it)",
    )


def check_devices() -> Iterator[DoctorFinding]:
    """Check cores, vector units, memory, GPUs."""
    flags = set(re.findall(r"\w+", _flags()))
    vector = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    is_ok = "avx2" in flags
    yield DoctorFinding(
        Level.OK if is_ok else Level.WARNING,
        "cpu",
        f"{counted(cpu_count(), 'core')}, {', '.join(vector) or 'no AVX2'}",
        "" if is_ok else "expect a slow run: torch's CPU kernels need AVX2 to be fast",
    )
    memory = memory_bytes()
    is_ok = memory >= 6 * GIB
    yield DoctorFinding(
        Level.OK if is_ok else Level.WARNING,
        "memory",
        f"{memory / GIB:.1f} GiB (cgroup limits included)",
        "" if is_ok else "the quickstart needs 6 GiB: raise the memory limit of the container or of WSL2",
    )
    names = probe_machine().gpu_names
    hidden = len(installed_gpus()) - len(names)
    text = ", ".join(names) or "none: runs use the CPU"
    yield DoctorFinding(Level.OK, "gpu", text + (f" ({hidden} hidden by CUDA_VISIBLE_DEVICES)" if hidden else ""))


def _flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def check_storage() -> Iterator[DoctorFinding]:
    """Check /dev/shm for Ray's object store, and the disks of the current folder (runs/) and the temporary folder."""
    for subject, folder, min_gib, fix in (
        ("/dev/shm", "/dev/shm", 1.0, "docker run --shm-size=4g ...; Ray falls back to the disk, which is slow"),
        ("disk", os.getcwd(), 5.0, "free some space: checkpoints go to run.dir"),
        (
            "tmp",
            tempfile.gettempdir(),
            2.0,
            "free some space, or set TMPDIR to another folder with a short path: Ray writes its files there",
        ),
    ):
        if not Path(folder).is_dir():
            yield DoctorFinding(Level.WARNING, subject, f"{folder} does not exist", fix)
            continue
        free = shutil.disk_usage(folder).free / GIB
        is_ok = free >= min_gib
        level = Level.OK if is_ok else Level.WARNING
        yield DoctorFinding(level, subject, f"{free:.1f} GiB free in {folder}", "" if is_ok else fix)


def check_limits() -> Iterator[DoctorFinding]:
    """Check ulimit and /dev/shm."""
    problems = list(limits_too_low("cuda" if probe_machine().num_gpus else "cpu"))
    for problem in problems:
        text, _, fix = problem.rpartition(": ")
        yield DoctorFinding(Level.MISSING, "limits", text, fix)
    if not problems:
        yield DoctorFinding(Level.OK, "limits", "open files, addresses, file size and shared memory suffice")


def check_network() -> Iterator[DoctorFinding]:
    """Check that ports of 127.0.0.1, which engines, Ray and process groups use, can be bound, and are reached without a proxy."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            yield DoctorFinding(Level.OK, "loopback", f"port {server.getsockname()[1]} of 127.0.0.1 responds")
    except OSError as error:
        yield DoctorFinding(
            Level.MISSING,
            "loopback",
            f"no port of 127.0.0.1 can be used: {error}",
            "bring the loopback interface up (ip link set lo up) and let the sandbox bind ports on it",
        )
    proxy = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)), None
    )
    bypass = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxy and bypass != "*" and "127.0.0.1" not in bypass:
        yield DoctorFinding(
            Level.WARNING,
            "proxy",
            f"{proxy} is set and no_proxy={bypass!r} does not name 127.0.0.1",
            "export no_proxy=127.0.0.1,localhost: requests to the engines must not go through a proxy",
        )
