"""Doctor's checks of the installed software: package versions, SGLang plugins, C kernels, gloo."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_like.cluster.start.doctor_finding import DoctorFinding, Level
from slime_like.errors import DeadlineExceeded
from slime_like.rollout.engine.plugins import ENTRY_POINTS, missing_entry_points
from slime_like.util.deadline import Deadline, scale
from slime_like.util.gpus import installed_gpus

REQUIREMENTS = Path(__file__).parents[3] / "scripts" / "requirements"
MAX_LISTED = 12  # if more packages differ, this is another environment, not a manual upgrade
GLOO_SECONDS = 90.0
KERNEL_SECONDS = 300.0


def check_versions() -> Iterator[DoctorFinding]:
    """Compare installed packages with the lock file; packages of runtime.in are required."""
    lock = REQUIREMENTS / ("gpu.lock" if installed_gpus() else "cpu.lock")
    if not lock.is_file():
        yield DoctorFinding(
            Level.WARNING, "versions", f"{lock} does not exist", "run the doctor in a checkout to compare versions"
        )
        return
    required = set(_names((REQUIREMENTS / "runtime.in").read_text()))
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))
    fix = (
        f"{sys.executable} -m pip install -r {lock.relative_to(REQUIREMENTS.parents[1])}, or run scripts/quickstart.sh"
    )
    versions = {name: _installed_version(name) for name, pin in pins.items() if _installed_version(name) != pin}
    if len(versions) > MAX_LISTED:
        yield DoctorFinding(
            Level.MISSING,
            "versions",
            f"{len(versions)} of {len(pins)} packages are missing or differ from {lock.name}: this is not the project's environment",
            f"{fix}, then use .venv/bin/python",
        )
        return
    for name, version in versions.items():
        level = Level.MISSING if _canonical(name) in required else Level.WARNING
        yield DoctorFinding(
            level, "versions", f"{name} {version or 'is not installed'}, the lock has {pins[name]}", fix
        )
    yield DoctorFinding(Level.OK, "versions", f"{len(pins) - len(versions)} of {len(pins)} packages match {lock.name}")
    for name in ("torch", "sglang", "megatron-core", "transformers", "ray", "hydra-core"):
        yield DoctorFinding(Level.OK, "", f"{name} {_installed_version(name)}")


def _names(requirements: str) -> list[str]:
    return [_canonical(name) for name in re.findall(r"^([A-Za-z0-9._-]+)", requirements, re.MULTILINE)]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_plugins() -> Iterator[DoctorFinding]:
    """Check the entry points through which SGLang finds this project's platform and plugins."""
    for group, names in ENTRY_POINTS.items():
        missing = missing_entry_points(group)
        yield DoctorFinding(
            Level.MISSING if missing else Level.OK,
            "entry points",
            f"{group}: {', '.join(missing)} not registered" if missing else f"{group}: {', '.join(names)}",
            f"{sys.executable} -m pip install --no-deps -e . (in the checkout)" if missing else "",
        )


def check_cpu_kernels() -> Iterator[DoctorFinding]:
    """Report which decode kernels an engine uses on this CPU, after compiling the C kernels if they are not cached.

    Report nothing on a machine with GPUs.
    """
    if installed_gpus():
        return
    command = [sys.executable, "-m", "slime_like_plugins.sglang_cpu.build"]
    try:
        result = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=KERNEL_SECONDS * scale()
        )
        is_ok, last_line = result.returncode == 0, (result.stdout or result.stderr).strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        is_ok, last_line = False, [f"the compiler took more than {KERNEL_SECONDS * scale():.0f} s"]
    text = last_line[0] if last_line else "no answer"
    yield DoctorFinding(
        Level.OK if is_ok else Level.WARNING,
        "cpu kernels",
        f"C: {text}" if is_ok else f"torch: {text}",
        "" if is_ok else "apt-get install gcc: engines on a CPU decode about twice as fast with C kernels",
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
            is_ok = all(rank.returncode == 0 for rank in ranks)
            problem = next(
                (e.strip().splitlines()[-1] for e, r in zip(errors, ranks, strict=True) if r.returncode and e), ""
            )
        except (subprocess.TimeoutExpired, DeadlineExceeded):
            is_ok, problem = False, f"no answer within {deadline.limit:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    yield DoctorFinding(
        Level.OK if is_ok else Level.MISSING,
        "gloo",
        f"two processes all-reduced in {deadline.elapsed():.1f} s"
        if is_ok
        else f"two processes could not all-reduce: {problem}",
        "" if is_ok else _collective_fix(problem),
    )


def _collective_fix(problem: str) -> str:
    """Return a fix for a failed all-reduce. ``problem`` is its error message, such as the last line of a traceback, or empty."""
    if "ModuleNotFoundError" in problem or "ImportError" in problem:
        return "bash scripts/setup.sh"
    return "unset GLOO_SOCKET_IFNAME, or set it to the interface of the network that ranks share (lo on one machine)"


def _environment() -> dict[str, str]:
    """Return an environment in which a child process can import this package even if it is not installed."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, [str(root), str(root / "plugins"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
