"""Rings of concurrent processes: a process may end while its ring is read, and new files of others are not removed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.distributed.forensics import ring as ring_module
from slime_like.distributed.forensics.report import dump
from slime_like.distributed.forensics.ring import PREFIX, GroupInfo, Ring, process_state, read_rings, start_time, sweep
from slime_like.distributed.guard.memory import RecordingMemorySource
from slime_like.distributed.wrapper import watchdog
from slime_like.distributed.wrapper.errors import explain, memory_or_last


def dead_ring(folder: Path) -> None:
    """Create the files of a killed rank."""
    code = "import sys, pathlib; from slime_like.distributed.forensics.ring import Ring; Ring(pathlib.Path(sys.argv[1]), 'a_rank0', 8)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_a_process_that_ends_during_a_read_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    original, reads, own_start = Path.read_text, itertools.count(), start_time(os.getpid())

    def once(path: Path, *args: Any, **kwargs: Any) -> str:
        if next(reads):
            raise ProcessLookupError(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", once)
    assert process_state(os.getpid(), own_start) == "running"
    assert process_state(os.getpid(), own_start) == "dead"


def test_a_ring_removed_during_a_read_is_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ring(tmp_path, "a_rank0", 8)

    def removed(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", removed)
    assert read_rings(tmp_path) == {}


def test_a_folder_in_use_by_starting_ranks_is_not_swept(tmp_path: Path) -> None:
    """One of two starting ranks could mistake the other's new files for old ones."""
    own_folder, foreign = tmp_path / f"{PREFIX}own", tmp_path / f"{PREFIX}other"
    for folder in (own_folder, foreign):
        dead_ring(folder)
    assert sweep(tmp_path, keep=own_folder) == [foreign]
    assert sweep(tmp_path) == [own_folder]


def test_rings_of_another_container_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --ipc=host these rings are in the same /dev/shm, but their process ids belong to another namespace."""
    folder = tmp_path / f"{PREFIX}theirs"
    dead_ring(folder)
    namespace = ring_module.pid_namespace()
    monkeypatch.setattr(ring_module, "pid_namespace", lambda: namespace + 1)
    assert sweep(tmp_path) == []
    monkeypatch.undo()
    assert sweep(tmp_path) == [folder]


def test_the_last_ring_to_close_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    first, last = (Ring(folder, f"a_rank{rank}", 8) for rank in range(2))
    first.close()
    assert folder.exists()
    last.close()
    assert not folder.exists()
    second = Ring(folder, "a_rank0", 8)
    assert second.path is not None
    second.path.unlink()
    folder.rmdir()  # as a concurrently closed ring does
    second.close()


def test_a_rank_ends_even_if_the_report_of_its_hang_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: object) -> str:
        raise OSError("no report")

    calls: list[str] = []
    monkeypatch.setattr(watchdog, "report", broken)
    monkeypatch.setattr(watchdog, "oldest_in_flight", lambda wrapper: 0)
    wrapper: Any = SimpleNamespace(record_completed=lambda: None, ring=SimpleNamespace(folder=None))
    thread = object.__new__(watchdog.Watchdog)
    thread._wrapper, thread._limit, thread._period, thread._records = wrapper, 0.0, 0.0, True
    thread._stopped, thread._end_process = watchdog.threading.Event(), lambda: calls.append("ended")
    with pytest.raises(OSError, match="no report"):
        thread._watch()
    assert calls == ["ended"]


def test_the_last_reading_is_reported_if_memory_queries_hang() -> None:
    ring, release = Ring(None, "a_rank0", 8), threading.Event()
    source: Any = SimpleNamespace(name="driver", total=4 * 2**30, trim=None, clear=None)
    source.free, source.process_bytes = lambda: 3 * 2**30, lambda: 2**30
    recording = RecordingMemorySource(source, ring)
    wrapper: Any = SimpleNamespace(ring=ring, guard=SimpleNamespace(source=recording))
    assert memory_or_last(wrapper, 60.0) == "memory: 3.00 of 4.00 GiB (driver) free, this rank holds 1.00"
    source.free = release.wait
    try:
        text = memory_or_last(wrapper, 0.01)
    finally:
        release.set()
    assert re.fullmatch(
        r"memory: no answer in 0\.01 s; memory [\d.]+ s ago: 3\.00 of 4\.00 GiB free, it held 1\.00", text
    )


def test_the_error_of_a_failed_memory_query_is_reported_with_the_last_one(tmp_path: Path) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: device-side assert\nCompile with TORCH_USE_CUDA_DSA")

    ring = Ring(tmp_path, "trainer_rank0", 8)
    ring.record_held(2**30)
    ring.record_free(3 * 2**30, 4 * 2**30)
    source = SimpleNamespace(name="driver", total=4 * 2**30, free=fail, process_bytes=lambda: 2**30)
    wrapper: Any = SimpleNamespace(ring=ring, guard=SimpleNamespace(source=source))
    assert re.fullmatch(
        r"memory: the query failed \(RuntimeError: CUDA error: device-side assert\); memory [\d.]+ s ago: "
        r"3\.00 of 4\.00 GiB free, it held 1\.00",
        memory_or_last(wrapper, 60.0),
    )


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        (5, r"all_reduce #3 of 64 bytes failed on rank \? after \d"),
        (9, r"all_reduce failed on rank \? after at least 4 later ops \(raise guard.ring"),
    ],
)
def test_a_failed_op_is_not_described_by_the_record_of_a_later_one(recorded: int, text: str) -> None:
    ring = Ring(None, "a_rank0", 4)
    start = ring.first_word(5)
    for offset, word in enumerate((recorded, time.perf_counter_ns(), 0, 64, 0, 3)):
        ring.words[start + offset] = word
    wrapper: Any = SimpleNamespace(ring=ring, phase_name="step", guard=SimpleNamespace(source=None))
    counter: Any = SimpleNamespace(
        op=SimpleNamespace(name="all_reduce"), group=SimpleNamespace(info=GroupInfo(0, "g", "dp", (0, 1)))
    )
    assert re.match(text, str(explain(wrapper, counter, 5, RuntimeError("timeout"))))


def test_a_rank_without_a_memory_query_is_reported(tmp_path: Path) -> None:
    Ring(tmp_path, "a_rank0", 8)
    assert "running, free memory never queried; oldest first" in dump(tmp_path)
