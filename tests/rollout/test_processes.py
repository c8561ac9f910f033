"""Shared memory segments of an engine are removed when its processes end; other files are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from slime_like.rollout.engine import processes
from slime_like.rollout.engine.processes import SHARED

MAP = "import mmap, os, sys; kept = [mmap.mmap(os.open(path, os.O_RDWR), 64) for path in sys.argv[1:]]; "


@pytest.fixture
def names() -> Generator[list[Path]]:
    """Create a segment with a name like SGLang's, and two files that are not segments."""
    (SHARED / f"models-{os.getpid()}").mkdir()
    files = [SHARED / f"sgl_shm_test_{os.getpid()}_0", SHARED / f"test-{os.getpid()}"]
    paths = [*files, SHARED / f"models-{os.getpid()}" / "sgl_shm_model"]
    for path in paths:
        path.write_bytes(bytes(64))
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)
    paths[-1].parent.rmdir()


def start(program: str, names: list[Path]) -> subprocess.Popen[bytes]:
    """Start a process group that has mapped the files."""
    command = [sys.executable, "-c", MAP + program, *map(str, names)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"mapped\n"
    return child


def test_only_segments_of_the_group_are_found_and_removed(names: list[Path]) -> None:
    child = start("print('mapped', flush=True); sys.stdin.read()", names)
    assert processes.mapped_segments(os.getpgid(0)) & set(names) == set()
    mapped = processes.mapped_segments(child.pid)
    assert mapped == {names[0]}
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    processes.remove_segments([*mapped, *mapped])
    assert [path.exists() for path in names] == [False, True, True]


def test_an_orphaned_child_removes_its_segments(names: list[Path]) -> None:
    program = (
        "from slime_like.rollout.engine.main import die_with_parent; die_with_parent(); "
        "print('mapped', flush=True); import signal; signal.pause()"
    )
    child = start(program, names)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait() == -signal.SIGKILL
    assert [path.exists() for path in names] == [False, True, True]
