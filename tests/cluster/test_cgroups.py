"""Memory limit and CPU quota of the control groups of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.util.cgroups import cpu_quota, memory_limit

GIB = 2**30


def write(folder: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup, and the ``files`` of control groups; return proc and the mount of the groups."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, root


@pytest.mark.parametrize(
    ("cgroup", "files", "memory", "cpus"),
    [
        ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}, None, None),
        ("0::/\n", {"memory.max": f"{GIB}\n", "cpu.max": "150000 100000\n"}, GIB, 1.5),
        ("0::/job/step\n", {"job/memory.max": f"{GIB}\n", "job/step/memory.max": f"{4 * GIB}\n"}, GIB, None),
        ("0::/job/step\n", {"job/step/cpu.max": "400000 100000\n", "job/cpu.max": "200000 100000\n"}, None, 2.0),
        ("0::/host/path\n", {"memory.max": f"{2 * GIB}\n"}, 2 * GIB, None),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{GIB}\n"}, GIB, None),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, None),
        (
            "2:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            None,
            0.5,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, None),
    ],
)
def test_the_tightest_group_limits_the_process(
    tmp_path: Path, cgroup: str, files: dict[str, str], memory: int | None, cpus: float | None
) -> None:
    proc, root = write(tmp_path, cgroup, files)
    assert (memory_limit(proc, root), cpu_quota(proc, root)) == (memory, cpus)


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path) is None and cpu_quota(tmp_path, tmp_path) is None
