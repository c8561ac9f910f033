"""Free host memory: the machine's, or the unused part of the tightest control group."""

from __future__ import annotations

from pathlib import Path

from slime_like.distributed.guard.memory import HostMemory

GIB = 2**30


def machine(tmp_path: Path, *, v2: dict[str, str] | None = None, v1: dict[str, str] | None = None) -> HostMemory:
    """Write /proc and control group files of a machine with 16 GiB, 8 of them available."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self/statm").write_text("1000 500 100 1 0 300 0\n")
    (proc / "self/cgroup").write_text("5:memory:/a/b\n1:cpu:/\n" if v1 else "0::/a/b\n")
    root = groups / "memory" if v1 else groups
    (root / "a/b").mkdir(parents=True)
    for name, text in (v1 or v2 or {}).items():
        (root / name).write_text(text)
    return HostMemory(proc, groups)


def test_host_memory_without_limits(tmp_path: Path) -> None:
    memory = machine(tmp_path)
    assert (memory.total, memory.free()) == (16 * GIB, 8 * GIB)
    assert memory.process_bytes() == 500 * 4096


def test_the_tightest_control_group_decides(tmp_path: Path) -> None:
    memory = machine(
        tmp_path,
        v2={
            "a/b/memory.max": "max\n",
            "a/memory.max": f"{4 * GIB}\n",
            "a/memory.current": f"{3 * GIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert (memory.total, memory.free()) == (4 * GIB, 2 * GIB)
    (tmp_path / "cgroup/a/memory.current").write_text(f"{4 * GIB}\n")
    assert memory.free() == GIB
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: 1024 kB\n")
    assert memory.free() == 2**20


def test_control_groups_of_version_one(tmp_path: Path) -> None:
    """The usage of a group includes its children, as does only the total of the page cache."""
    memory = machine(
        tmp_path,
        v1={
            "a/b/memory.limit_in_bytes": f"{2 * GIB}\n",
            "a/b/memory.usage_in_bytes": f"{GIB}\n",
            "a/b/memory.stat": "inactive_file 2\nhierarchical_memory_limit 9\ntotal_inactive_file 7\n",
            "memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert (memory.total, memory.free()) == (2 * GIB, GIB + 7)


def test_this_machine() -> None:
    memory = HostMemory()
    assert 0 < memory.free() <= memory.total
    assert memory.process_bytes() > 10 * 2**20
    memory.trim()
    memory.clear()
