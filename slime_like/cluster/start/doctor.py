"""``train.py --doctor``: checks machine and environment. Every finding names its fix. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from slime_like.cluster.plan.machine import cpu_count, memory_bytes, probe_machine
from slime_like.cluster.start.limits import too_low
from slime_like.errors import DeadlineExceeded
from slime_like.printable import visible
from slime_like.util.deadline import Deadline
from slime_like.util.gpus import installed_gpus

GIB = 2**30
REQUIREMENTS = Path(__file__).parents[3] / "scripts" / "requirements"
MIN_GLIBC = (2, 34)
MANY_WRONG = 12  # more than a manual upgrade would leave
GLOO_SECONDS = 90.0
KERNEL_SECONDS = 300.0
ENTRY_POINTS = {
    "sglang.srt.platforms": ("slime_like_cpu",),
    "sglang.srt.plugins": ("slime_like_cpu", "slime_like_rollout_sampling", "slime_like_weight_commit"),
}


class Level(StrEnum):
    """Severity of a finding; ``MISSING`` makes the doctor exit with 1."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report; ``fix`` is empty if the level is OK."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def doctor(out: TextIO) -> int:
    """Write the report to ``out``. Return 1 if something required is missing, else 0."""
    missing = 0
    for check in CHECKS:
        for finding in check():
            missing += finding.level is Level.MISSING
            fix = f"\n{'':<24}fix: {finding.fix}" if finding.fix else ""
            out.write(visible(f"{finding.level:<8} {finding.subject:<14} {finding.text}{fix}\n"))
            out.flush()
    out.write(visible("all requirements are met\n" if not missing else f"{missing} requirements are not met\n"))
    return int(missing > 0)


def check_system() -> Iterator[DoctorFinding]:
    """Check Python, kernel, libc, compiler."""
    version = platform.python_version()
    good = sys.version_info[:2] == (3, 12)
    yield DoctorFinding(
        Level.OK if good else Level.MISSING,
        "python",
        f"{version} ({sys.executable})",
        "" if good else "install Python 3.12 and run scripts/quickstart.sh again",
    )
    system = f"{platform.system()} {platform.machine()}"
    good = system == "Linux x86_64"
    yield DoctorFinding(
        Level.OK if good else Level.MISSING,
        "platform",
        f"{system}, kernel {platform.release()}",
        "" if good else "use Linux on x86-64: WSL2 on Windows, the CPU image of docker/ elsewhere",
    )
    libc, number = platform.libc_ver()
    good = libc == "glibc" and tuple(int(part) for part in number.split(".")[:2]) >= MIN_GLIBC
    yield DoctorFinding(
        Level.OK if good else Level.MISSING,
        "libc",
        f"{libc or 'unknown'} {number}",
        "" if good else "SGLang's wheel needs glibc 2.34: Ubuntu 22.04, Debian 12, RHEL 9 or newer",
    )
    compiler = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    yield DoctorFinding(
        Level.OK if compiler else Level.WARNING,
        "compiler",
        compiler or "no C++ compiler",
        "" if compiler else "apt-get install g++ (only torch.compile and GPU kernels that build on first use need it)",
    )


def check_versions() -> Iterator[DoctorFinding]:
    """Compare installed packages with the lock file; packages of runtime.in are required."""
    lock = REQUIREMENTS / ("gpu.lock" if installed_gpus() else "cpu.lock")
    if not lock.is_file():
        yield DoctorFinding(
            Level.WARNING, "versions", f"{lock} is not here", "run the doctor in a checkout to compare versions"
        )
        return
    required = set(_names((REQUIREMENTS / "runtime.in").read_text()))
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))
    fix = (
        f"{sys.executable} -m pip install -r {lock.relative_to(REQUIREMENTS.parents[1])}, or run scripts/quickstart.sh"
    )
    wrong = {name: _installed(name) for name, pinned in pins.items() if _installed(name) != pinned}
    if len(wrong) > MANY_WRONG:
        yield DoctorFinding(
            Level.MISSING,
            "versions",
            f"{len(wrong)} of {len(pins)} packages are missing or differ from {lock.name}: this is not the project's environment",
            f"{fix}, then use .venv/bin/python",
        )
        return
    for name, have in wrong.items():
        level = Level.MISSING if _canonical(name) in required else Level.WARNING
        yield DoctorFinding(level, "versions", f"{name} {have or 'is not installed'}, the lock has {pins[name]}", fix)
    yield DoctorFinding(Level.OK, "versions", f"{len(pins) - len(wrong)} of {len(pins)} packages match {lock.name}")
    for name in ("torch", "sglang", "megatron-core", "transformers", "ray", "hydra-core"):
        yield DoctorFinding(Level.OK, "", f"{name} {_installed(name)}")


def _names(requirements: str) -> list[str]:
    return [_canonical(name) for name in re.findall(r"^([A-Za-z0-9._-]+)", requirements, re.MULTILINE)]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_devices() -> Iterator[DoctorFinding]:
    """Check cores, vector units, memory, GPUs."""
    flags = set(re.findall(r"\w+", _flags()))
    vector = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    good = "avx2" in flags
    yield DoctorFinding(
        Level.OK if good else Level.WARNING,
        "cpu",
        f"{cpu_count()} cores, {', '.join(vector) or 'no AVX2'}",
        "" if good else "expect a slow run: torch's CPU kernels need AVX2 to be fast",
    )
    memory = memory_bytes()
    enough = memory >= 6 * GIB
    yield DoctorFinding(
        Level.OK if enough else Level.WARNING,
        "memory",
        f"{memory / GIB:.1f} GiB (cgroup limits included)",
        "" if enough else "the quickstart needs 6 GiB: raise the memory limit of the container or of WSL2",
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
    """Check /dev/shm for Ray's object store, and the disks of runs/ and the temporary folder."""
    for subject, folder, needed, fix in (
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
        good = free >= needed
        level = Level.OK if good else Level.WARNING
        yield DoctorFinding(level, subject, f"{free:.1f} GiB free in {folder}", "" if good else fix)


def check_limits() -> Iterator[DoctorFinding]:
    """Check ulimit and /dev/shm."""
    problems = list(too_low("cuda" if probe_machine().num_gpus else "cpu"))
    for problem in problems:
        text, _, fix = problem.rpartition(": ")
        yield DoctorFinding(Level.MISSING, "limits", text, fix)
    if not problems:
        yield DoctorFinding(Level.OK, "limits", "open files, addresses, file size and shared memory suffice")


def check_network() -> Iterator[DoctorFinding]:
    """Check that a loopback port can be bound and reached, as engines, Ray and process groups require."""
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
    if proxy and "127.0.0.1" not in bypass:
        yield DoctorFinding(
            Level.WARNING,
            "proxy",
            f"{proxy} is set and no_proxy={bypass!r} does not name 127.0.0.1",
            "export no_proxy=127.0.0.1,localhost: requests to the engines must not go through a proxy",
        )


def check_plugins() -> Iterator[DoctorFinding]:
    """Check the entry points by which SGLang finds our platform and plugins."""
    for group, names in ENTRY_POINTS.items():
        registered = {point.name for point in importlib.metadata.entry_points(group=group)}
        absent = [name for name in names if name not in registered]
        yield DoctorFinding(
            Level.MISSING if absent else Level.OK,
            "entry points",
            f"{group}: {', '.join(absent)} not registered" if absent else f"{group}: {', '.join(names)}",
            f"{sys.executable} -m pip install --no-deps -e . (in the checkout)" if absent else "",
        )


def check_cpu_kernels() -> Iterator[DoctorFinding]:
    """Report the decode kernels of an engine on this CPU; compile the C kernels if not cached."""
    if installed_gpus():
        return
    command = [sys.executable, "-m", "slime_like_plugins.sglang_cpu.build"]
    try:
        result = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=KERNEL_SECONDS)
        good, last_line = result.returncode == 0, (result.stdout or result.stderr).strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        good, last_line = False, [f"the compiler took more than {KERNEL_SECONDS:.0f} s"]
    text = last_line[0] if last_line else "no answer"
    yield DoctorFinding(
        Level.OK if good else Level.WARNING,
        "cpu kernels",
        f"C: {text}" if good else f"torch: {text}",
        "" if good else "apt-get install gcc: engines on a CPU decode about twice as fast with C kernels",
    )


def check_collective() -> Iterator[DoctorFinding]:
    """Check an all-reduce of two processes over gloo, as used by trainer ranks and weight broadcasts."""
    deadline = Deadline("doctor", "gloo all_reduce", GLOO_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "slime_like.cluster.start.gloo_check", str(Path(folder) / "store")]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), "2"], env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=deadline.remaining("both ranks"))[1].decode() for rank in ranks]
            good = all(rank.returncode == 0 for rank in ranks)
            problem = next(
                (e.strip().splitlines()[-1] for e, r in zip(errors, ranks, strict=True) if r.returncode and e), ""
            )
        except (subprocess.TimeoutExpired, DeadlineExceeded):
            good, problem = False, f"no answer within {deadline.limit:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    yield DoctorFinding(
        Level.OK if good else Level.MISSING,
        "gloo",
        f"two processes all-reduced in {deadline.elapsed():.1f} s"
        if good
        else f"two processes could not all-reduce: {problem}",
        ""
        if good
        else "unset GLOO_SOCKET_IFNAME, or set it to the interface of the network that ranks share (lo on one machine)",
    )


def _environment() -> dict[str, str]:
    """Return the environment of a process that imports this package, installed or not."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, [str(root), str(root / "plugins"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    check_system,
    check_versions,
    check_devices,
    check_storage,
    check_limits,
    check_network,
    check_plugins,
    check_cpu_kernels,
    check_collective,
)
