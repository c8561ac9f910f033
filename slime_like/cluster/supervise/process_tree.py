"""The processes that one process has started, directly or not, and an end to them."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from slime_like.rollout.engine import segments

MARK = "SLIME_LIKE_RUN"  # environment variable that everything inherits: also what the tree of parents has lost
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
WAIT_S = 0.05
END_S = 20.0  # for killed processes to be gone; one in an uninterruptible wait takes as long as its disk

AGENTS = {  # children of the raylet: name -> parts of its command line, with a title and before it has one
    "dashboard agent": ("ray::DashboardAgent", "dashboard/agent.py"),
    "runtime-env agent": ("ray::RuntimeEnvAgent", "runtime_env/agent/main.py"),
}


def adopt(adopting: bool = True) -> bool:
    """Become the parent of every descendant whose own parent ends, so that none leaves the tree; return what was set before.

    ``adopting=False``: such a descendant goes to the next ancestor that adopts.
    """
    before = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER)")
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopting), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    return bool(before.value)


def children() -> frozenset[psutil.Process]:
    """The processes that this one has started itself, or adopted."""
    return frozenset(psutil.Process().children())


def descendants(spared: frozenset[psutil.Process] = frozenset()) -> list[psutil.Process]:
    """Every process that this one has started, directly or not; but ``spared`` children and what is theirs."""
    found: list[psutil.Process] = []
    for child in children() - spared:
        found.append(child)
        with suppress(psutil.Error):
            found += child.children(recursive=True)
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Every other process that was started with ``MARK=mark`` in its environment."""
    found: list[psutil.Process] = []
    wanted = f"{MARK}={mark}".encode()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.pid != os.getpid() and wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each, and remove the shared memory and scratch folders of engines among them, which they no longer can."""
    targets = list(processes)
    pids = [process.pid for process in targets]
    names, folders = segments.mapped_by(pids), segments.scratch_of(pids)
    for process in targets:
        with suppress(psutil.Error):  # psutil compares start times: not a later process of the same id
            process.kill()
    segments.remove(names)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def of_ray() -> dict[str, int]:
    """Processes of the Ray that this process has started, without which a run cannot go on: name -> process id."""
    named = {_name(child): child for child in children()}
    found = {name: named[name].pid for name in ("raylet", "gcs_server") if name in named}
    return found | (agents(named["raylet"]) if "raylet" in found else {})


def agents(raylet: psutil.Process) -> dict[str, int]:
    """Its agents, which it starts a moment after itself: name -> process id."""
    found: dict[str, int] = {}
    with suppress(psutil.Error):
        for child in raylet.children():
            line = command(child)
            found |= {name: child.pid for name, marks in AGENTS.items() if any(mark in line for mark in marks)}
    return found


def reward_workers() -> list[int]:
    """Reward workers among what this process has started."""
    return [process.pid for process in descendants() if "slime_like.reward.worker" in command(process)]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def is_stopped(process: psutil.Process) -> bool:
    """Return True for a process that is stopped, as by SIGSTOP."""
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def command(process: psutil.Process) -> str:
    """Return the command line of a process, shortened; empty once it has ended."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return ""
