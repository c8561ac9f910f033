"""Reaper: processes started by user code in an existing Ray cluster end with the process that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from slime_like.cluster.supervise import process_tree
from slime_like.cluster.supervise.reaper import Reaper, reaper
from slime_like.errors import ProcessLost
from slime_like.util.deadline import Deadline
from tests.e2e.runs import REPOSITORY
from tests.process_states import is_alive

OWNER = """
import os, signal, subprocess, sys, time
from slime_like.cluster.supervise.reaper import reaper
unrelated = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
process_reaper = reaper()
child = subprocess.Popen(["setsid", "sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)  # orphaned immediately
pids, pids_in = os.pipe()
for generation in range(2):  # the second one is orphaned immediately, while the first one lives
    if (fork := os.fork()) == 0:
        if generation == 1 and os.fork():
            os._exit(0)
        os.write(pids_in, b"%7d" % os.getpid())
        signal.pause()
    if generation == 1:
        os.waitpid(fork, 0)
if (server := os.fork()) == 0:  # forks until it is killed, with a limit for a failed test
    os.setsid()
    for _ in range(2000):
        if os.fork() == 0:
            signal.pause()
        time.sleep(0.003)
print(server, unrelated.pid, int(child.stdout.readline()), int(os.read(pids, 7)), int(os.read(pids, 7)), process_reaper is not None, flush=True)
if sys.argv[1] == "closes":
    sys.stdin.readline()
    process_reaper.close()
    print("closed", flush=True)
sys.stdin.read()
"""


def members(session: int) -> list[int]:
    """Return the ids of the living processes of a session."""
    pids: list[int] = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session and is_alive(pid):
                pids.append(pid)
    return pids


@pytest.mark.parametrize("end", ["closes", "killed"])
def test_processes_of_user_code_end_with_their_owner(end: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != process_tree.MARK}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, end],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server, unrelated, *started, reaped = owner.stdout.readline().split()
    try:
        assert reaped == "True" and all(is_alive(int(pid)) for pid in started) and len(started) == 3
        if end == "killed":
            owner.kill()
            deadline = Deadline("test", "end", 30)
            while any(is_alive(int(pid)) for pid in started) or members(int(server)):
                deadline.remaining("a process of user code")
                time.sleep(0.02)
        else:
            assert owner.stdin is not None
            owner.stdin.write("close\n")
            owner.stdin.flush()
            assert owner.stdout.readline() == "closed\n" and not any(is_alive(int(pid)) for pid in started)
            assert not members(int(server))
        assert is_alive(int(unrelated)), "processes started before the reaper are not touched"
    finally:
        owner.kill()
        owner.wait()
        for pid in (unrelated, *started, *members(int(server))):
            with suppress(psutil.Error):
                psutil.Process(int(pid)).kill()


def test_a_supervised_process_has_no_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_tree.MARK, "1.2")
    assert reaper() is None


def test_a_reaper_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ProcessLost, match="user code's children exited with code 1 at its start"):
        Reaper()
