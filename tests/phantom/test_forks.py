"""Process that forks ranks: a fork is like the rank of ``run_ranks``, and ends with the process of the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from slime_like.util.deadline import scale
from tests.phantom.forks import PhantomForks
from tests.train.ranks import ROOT, RankWorld, run_ranks

SECONDS = 20
NO_IMPORTS = "builtins:dict"
HERE = "tests.phantom.test_forks"
CLIENT = f"""
import sys
from tests.phantom.forks import PhantomForks
PhantomForks("{NO_IMPORTS}", {{}}).run("{HERE}:pause", sys.argv[1])
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[PhantomForks]:
    with PhantomForks(NO_IMPORTS, {"OF_THE_SERVER": "1"}) as forks:
        yield forks


def surroundings(world: RankWorld, *args: object) -> dict[str, Any]:
    """Return what a process inherits, and the arguments."""
    return {
        "rank": (world.rank, world.size, args),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "leads a session": os.getsid(0) == os.getpid(),
        "handlers": [
            str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
        ],
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    }


def fail(world: RankWorld) -> None:
    raise ValueError(f"of rank {world.rank}")


def pause(world: RankWorld, file: str) -> None:
    """Write the process ids of this fork and of its parent, and wait for a signal."""
    del world
    Path(file).write_text(json.dumps([os.getpid(), os.getppid()]))
    signal.pause()


def test_a_fork_has_the_surroundings_of_a_new_process(forks: PhantomForks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_AFTER_THE_START", "1")
    for number in range(2):
        result = forks.run(f"{HERE}:surroundings", number, environment={"OF_THE_FORK": "1"})
        (expected,) = run_ranks(f"{HERE}:surroundings", 1, number, environment={"OF_THE_FORK": "1"})
        assert result == expected
        assert result["environment"]["SET_AFTER_THE_START"] == "1" and "OF_THE_SERVER" not in result["environment"]


def test_a_failed_fork_is_reported_and_later_ones_run(forks: PhantomForks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 1 ended with 1.*ValueError: of rank 0"):
        forks.run(f"{HERE}:fail")
    assert forks.run(f"{HERE}:surroundings")["rank"] == (0, 1, ())


def test_forks_end_with_a_killed_test_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "processes")
    with open(os.open(tmp_path / "processes", os.O_RDONLY | os.O_NONBLOCK)) as processes, ExitStack() as stack:
        with subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path / "processes")], cwd=ROOT) as client:
            assert wait([processes.fileno()], SECONDS * scale()), "no fork has started"
            running = {os.pidfd_open(pid) for pid in json.loads(processes.read())}
            client.kill()
        for handle in running:
            stack.callback(os.close, handle)
        while running:
            ended = wait([*running], SECONDS * scale())
            assert ended, "a process runs on"
            running.difference_update(handle for handle in ended if isinstance(handle, int))
