"""Limits of the control groups (v1 and v2) of this process: memory and CPU quota, in the group or any of its parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as the largest multiple of the page size


def control_groups(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Yield each control group of this process for ``controller``, innermost first: its folder, and 1 or 2 for its version.

    In a container, ``/proc/self/cgroup`` may contain the group's path on the host, although only the container's own group is
    mounted. Some of the yielded folders then do not exist, and the last one, the mount itself, is the container's group.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, version = [root], 2
        elif controller in controllers.split(","):
            mounts, version = list(dict.fromkeys([root / controller, root / controllers])), 1
        else:
            continue
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        if mount is None:
            continue
        leaf = mount / path.lstrip("/")
        yield from ((folder, version) for folder in (leaf, *leaf.parents) if folder.is_relative_to(mount))


def memory_limit(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Return the tightest memory limit in bytes; None if there is none."""
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = (_number(folder / names[version]) for folder, version in control_groups("memory", proc, root))
    return min((limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES), default=None)


def cpu_quota(proc: Path = PROC, root: Path = ROOT) -> float | None:
    """Return the tightest CPU quota in cores; None if there is none."""
    quotas = (_quota(folder, version) for folder, version in control_groups("cpu", proc, root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, version: int) -> float | None:
    if version == 1:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        return quota / period if quota and period else None
    words = _text(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _number(path: Path) -> int | None:
    """Return the number in a file; None for ``max``, ``-1`` and a missing file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
