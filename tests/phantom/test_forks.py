"""Process that forks ranks: a fork is like the rank of ``run_ranks``, and ends with the process of the tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from slime_like.errors import DeadlineExceeded
from slime_like.util.deadline import Deadline, scale
from tests.phantom import forks as forks_module
from tests.phantom.forks import PhantomForks
from tests.train import ranks
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
        "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    }


def fail(world: RankWorld) -> None:
    raise ValueError(f"of rank {world.rank}")


def kill_itself(world: RankWorld) -> None:
    del world
    os.kill(os.getpid(), signal.SIGKILL)


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
    with pytest.raises(AssertionError, match="rank 0 of 1 ended with -9"):
        forks.run(f"{HERE}:kill_itself")
    assert forks.run(f"{HERE}:surroundings")["rank"] == (0, 1, ())


def stop_parent(world: RankWorld) -> None:
    del world
    os.kill(os.getppid(), signal.SIGSTOP)


def wait_for_reader() -> None:
    """Wait until the file of the variable FIFO is read."""
    Path(os.environ["FIFO"]).write_text("imports end")


def await_reply(forks: PhantomForks) -> None:
    """Wait until the process has written the exit code of its rank."""
    process = forks._process
    assert process is not None and process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS * scale())[0], "no exit code"


def test_a_fork_may_end_before_it_is_awaited(forks: PhantomForks, monkeypatch: pytest.MonkeyPatch) -> None:
    open_handle = os.pidfd_open

    def open_late(pid: int) -> int:
        await_reply(forks)
        return open_handle(pid)

    monkeypatch.setattr(os, "pidfd_open", open_late)
    for number in range(2):
        assert forks.run(f"{HERE}:surroundings", number)["rank"] == (0, 1, (number,))


def test_an_error_after_the_end_of_a_fork_is_raised(forks: PhantomForks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        await_reply(forks)
        raise ValueError("the reason")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="the reason"):
        patch.setattr(ranks, "await_ranks", interrupted)
        forks.run(f"{HERE}:surroundings", "first")
    assert forks.run(f"{HERE}:surroundings", "second")["rank"] == (0, 1, ("second",))


def test_a_process_without_an_answer_is_replaced(forks: PhantomForks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks_module, "REPLY_S", 0.2)
    with pytest.raises(DeadlineExceeded, match="in phase 'fork'"):
        forks.run(f"{HERE}:stop_parent")
    monkeypatch.undo()
    assert forks.run(f"{HERE}:surroundings", "next")["rank"] == (0, 1, ("next",))


def test_a_rank_has_the_time_that_the_imports_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    limits: list[float] = []
    fork_rank, read_number = forks_module.fork_rank, forks_module.read_number

    def record(process: subprocess.Popen[bytes], request: dict[str, Any]) -> forks_module.ForkedRank:
        limits.append(float(request["rank"][-1]))
        return fork_rank(process, request)

    def read_and_record(process: subprocess.Popen[bytes], deadline: Deadline, subject: str) -> int:
        number = read_number(process, deadline, subject)
        if subject == "the imports":
            limits.append(deadline.remaining(subject))
        return number

    monkeypatch.setattr(forks_module, "fork_rank", record)
    with PhantomForks(f"{HERE}:wait_for_reader", {"FIFO": str(tmp_path / "fifo")}) as forks:
        with pytest.raises(DeadlineExceeded, match="for the imports in phase"):
            forks.run(f"{HERE}:surroundings", "first", seconds=0.2)
        monkeypatch.setattr(forks_module, "read_number", read_and_record)
        with open(os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)):
            assert forks.run(f"{HERE}:surroundings", "second")["rank"] == (0, 1, ("second",))
    after_imports, of_rank = limits
    assert of_rank < after_imports


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
