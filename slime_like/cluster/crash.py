"""What a failed run leaves for whoever has to find out why: one folder, cause first."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from slime_like.cluster.stacks import request_stacks

LIBRARIES = ("torch", "sglang", "megatron-core", "ray", "transformers", "numpy")
TAIL_LINES = 60
STACKS_WAIT_S = 1.0


def write_bundle(run_dir: Path, error: BaseException, extra: Iterable[str] = ()) -> Path:
    """Write ``run_dir/crash-<time>``: cause, traceback, stacks of the run's processes, log tails, config, versions."""
    bundle = run_dir / f"crash-{time.strftime('%Y%m%d-%H%M%S')}"
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "cause.txt").write_text("\n".join([one_line(error), *extra]) + "\n")
    (bundle / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    (bundle / "versions.txt").write_text("\n".join(_versions()) + "\n")
    stacks = run_dir / "stacks"
    if stacks.exists():
        request_stacks(stacks)
        time.sleep(STACKS_WAIT_S)  # faulthandler writes from a signal handler and reports to nobody
        shutil.copytree(stacks, bundle / "stacks", dirs_exist_ok=True)
    for log in sorted((run_dir / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        (bundle / f"{log.stem}.tail.txt").write_text("\n".join(lines) + "\n")
    config = run_dir / "config.yaml"
    if config.exists():
        shutil.copy(config, bundle / "config.yaml")
    return bundle


def one_line(error: BaseException) -> str:
    """The cause without its traceback."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else '(no message)'}"


def _versions() -> list[str]:
    found = [f"python {platform.python_version()} on {platform.platform()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
    return found
