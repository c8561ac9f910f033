"""Shared memory of an engine's processes goes with them, however they end; nobody else's does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from slime_like.rollout.engine import segments
from slime_like.rollout.engine.segments import SHARED

MAP = "import mmap, os, sys; kept = [mmap.mmap(os.open(path, os.O_RDWR), 64) for path in sys.argv[1:]]; "


@pytest.fixture
def names() -> Generator[list[Path]]:
    """A segment with a name of SGLang's, and two files that are none."""
    (SHARED / f"models-{os.getpid()}").mkdir()
    own = [SHARED / f"sgl_shm_test_{os.getpid()}_0", SHARED / f"test-{os.getpid()}"]
    paths = [*own, SHARED / f"models-{os.getpid()}" / "sgl_shm_model"]
    for path in paths:
        path.write_bytes(bytes(64))
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)
    paths[-1].parent.rmdir()


def start(program: str, names: list[Path]) -> subprocess.Popen[bytes]:
    """A process group of its own that has mapped the files, and has said so."""
    command = [sys.executable, "-c", MAP + program, *map(str, names)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"mapped\n"
    return child


def test_only_segments_of_the_group_are_found_and_removed(names: list[Path]) -> None:
    child = start("print('mapped', flush=True); sys.stdin.read()", names)
    assert segments.mapped(os.getpgid(0)) & set(names) == set()
    found = segments.mapped(child.pid)
    assert found == {names[0]}
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    segments.remove([*found, *found])
    assert [path.exists() for path in names] == [False, True, True]


def test_a_child_whose_parent_is_gone_removes_its_own(names: list[Path]) -> None:
    program = (
        "from slime_like.rollout.engine.server import die_with_parent; die_with_parent(); "
        "print('mapped', flush=True); import signal; signal.pause()"
    )
    child = start(program, names)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait() == -signal.SIGKILL
    assert [path.exists() for path in names] == [False, True, True]
