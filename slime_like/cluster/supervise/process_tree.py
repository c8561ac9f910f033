"""Find and kill the descendants of a process."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from slime_like.rollout.engine.processes import remove_segments, scratch_folders_of, segments_of

MARK = "SLIME_LIKE_RUN"  # inherited environment variable: also finds processes that left the tree
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
WAIT_S = 0.05
END_S = 20.0  # for killed processes to exit; a process that waits for a disk exits only when the disk responds

RAY_AGENTS = {  # children of the raylet, by name: parts of the command line with and without a process title
    "dashboard agent": ("ray::DashboardAgent", "dashboard/agent.py"),
    "runtime-env agent": ("ray::RuntimeEnvAgent", "runtime_env/agent/main.py"),
}


def adopt(adopting: bool = True) -> bool:
    """Set whether orphaned descendants become children of this process; return the previous setting.

    If ``adopting`` is False, an orphan becomes a child of the next ancestor that adopts. Raises ``OSError`` if prctl
    fails.
    """
    previous = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(previous), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER)")
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopting), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    return bool(previous.value)


def children() -> frozenset[psutil.Process]:
    """Return the direct and adopted children of this process."""
    return frozenset(psutil.Process().children())


def has_ended_child() -> bool:
    """Return whether a child waits to be reaped. Unlike ``children``, it does not read all processes of the machine."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # no child at all
        return False


def descendants(excluded: frozenset[psutil.Process] = frozenset()) -> list[psutil.Process]:
    """Return all descendants of this process, except ``excluded`` children and their descendants."""
    processes: list[psutil.Process] = []
    for child in children() - excluded:
        processes.append(child)
        with suppress(psutil.Error):
            processes += child.children(recursive=True)
    return processes


def find_marked(mark: str) -> list[psutil.Process]:
    """Return every process, except this one, that has ``MARK=mark`` in its environment.

    The kernel shows the environment with which a program was started. A child that is forked after a change of ``os.environ``
    is not found before it starts a program.
    """
    processes: list[psutil.Process] = []
    variable = f"{MARK}={mark}".encode()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.pid != os.getpid() and variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(
                b"\0"
            ):
                processes.append(process)
    return processes


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process, and remove the shared memory and scratch folders of the engines among them."""
    targets = list(processes)
    pids = [process.pid for process in targets]
    names, folders = segments_of(pids), scratch_folders_of(pids)
    for process in targets:
        with suppress(psutil.Error):  # psutil compares start times: never kills a later process with the same id
            process.kill()
    remove_segments(names)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def ray_processes() -> dict[str, int]:
    """Return a dict from name to pid of the essential processes of the Ray instance that this process started."""
    child_names = {_name(child): child for child in children()}
    pids = {name: child_names[name].pid for name in ("raylet", "gcs_server") if name in child_names}
    return pids | (ray_agents(child_names["raylet"]) if "raylet" in pids else {})


def ray_agents(raylet: psutil.Process) -> dict[str, int]:
    """Return a dict from name to pid of the agents that a raylet has started so far; it starts them with a delay."""
    pids: dict[str, int] = {}
    with suppress(psutil.Error):
        for child in raylet.children():
            with suppress(psutil.Error):  # it has ended
                line = " ".join(child.cmdline())
                pids |= {name: child.pid for name, marks in RAY_AGENTS.items() if any(mark in line for mark in marks)}
    return pids


def reward_workers() -> list[int]:
    """Return the pids of the reward workers among the descendants of this process."""
    return [process.pid for process in descendants() if "slime_like.reward.worker" in command(process)]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def is_stopped(process: psutil.Process) -> bool:
    """Return True if a process is suspended, for example by SIGSTOP."""
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
