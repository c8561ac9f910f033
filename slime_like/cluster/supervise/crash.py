"""Write a crash bundle, a folder with the evidence of a failed run."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from slime_like.cluster.plan.guard import ring_folder
from slime_like.cluster.supervise.stacks import gather_stacks
from slime_like.distributed.forensics import report as forensics
from slime_like.printable import visible

LIBRARIES = ("torch", "sglang", "megatron-core", "ray", "transformers", "numpy")
RAY = ("raylet", "gcs_server", "dashboard_agent", "runtime_env_agent")
TAIL_LINES = 60
TAIL_BYTES = 65_536
STACKS_WAIT_S = 2.0


def write_bundle(run_dir: Path, error: BaseException, extra: Iterable[str] = (), ray_logs: Path | None = None) -> Path:
    """Write a crash bundle to ``run_dir/crash-<time>`` and return its path.

    It contains the cause and the lines of ``extra``, the traceback, the stacks and last collectives of the processes on
    this node, the ends of logs, the run's config, and the versions of libraries. ``ray_logs`` is Ray's log folder on this
    node; None if there is none.
    """
    bundle = run_dir / f"crash-{time.strftime('%Y%m%d-%H%M%S')}"
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "cause.txt").write_text(visible("\n".join([one_line(error), *extra]) + "\n"))
    (bundle / "traceback.txt").write_text(visible("".join(traceback.format_exception(error))))
    if text := forensics.dump(ring_folder(str(run_dir))):  # before another run removes rings of dead processes
        (bundle / "collectives.txt").write_text(visible(text))
    (bundle / "versions.txt").write_text("\n".join(_versions()) + "\n")
    stacks = run_dir / "stacks"
    if stacks.exists():
        gather_stacks(stacks, STACKS_WAIT_S)
        shutil.copytree(stacks, bundle / "stacks", dirs_exist_ok=True)
    for log in sorted((run_dir / "logs").glob("*.log")):
        (bundle / f"{log.stem}.tail.txt").write_text(_tail(log))
    for name, log in _worker_logs(stacks, ray_logs):
        (bundle / f"{name}.tail.txt").write_text(_tail(log))
    config = run_dir / "config.yaml"
    if config.exists():
        shutil.copy(config, bundle / "config.yaml")
    return bundle


def _worker_logs(stacks: Path, ray_logs: Path | None) -> list[tuple[str, Path]]:
    """Return (name, path) of each non-empty log of Ray's processes (``RAY``) and of the run's actors; empty without ``ray_logs``.

    The logs of actors are found by the pids in the names of the files in ``stacks``. The bundle needs a copy of these logs,
    because the folder of a Ray that the run has started is removed at the end of the run.
    """
    if ray_logs is None:
        return []
    logs = [(f"ray_{log.name}", log) for name in RAY for log in ray_logs.glob(f"{name}.*") if log.stat().st_size]
    for path in stacks.glob("*.txt"):
        name, pid, _ = path.stem.rsplit(".", 2)
        logs += [(f"{name}{log.suffix}", log) for log in ray_logs.glob(f"worker-*-{pid}.*") if log.stat().st_size]
    return logs


def _tail(path: Path) -> str:
    """Return the end of a log, at most ``TAIL_LINES`` lines and ``TAIL_BYTES`` bytes, safe to print on a terminal."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return visible("\n".join(text.splitlines()[-TAIL_LINES:]) + "\n")


def one_line(error: BaseException) -> str:
    """Return the type of the error and the first line of its message."""
    text = str(error).strip().splitlines()
    return visible(f"{type(error).__name__}: {text[0] if text else '(no message)'}")


def _versions() -> list[str]:
    versions = [f"python {platform.python_version()} on {platform.platform()}"]
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} is not installed")
    return versions
