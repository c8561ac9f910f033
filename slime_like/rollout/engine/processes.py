"""Running processes of an engine, which form one process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def members(group: int) -> Iterator[Path]:
    """Yield ``/proc/<pid>`` of each process of a group."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                yield process
        except OSError:  # the process has ended
            continue


def parts(group: int, part: str) -> tuple[int, ...]:
    """Return the process ids of one kind: ``http server`` (leader of the group), ``detokenizer`` or ``scheduler``."""
    if part == "http server":
        return (group,)
    pids: list[int] = []
    for process in members(group):
        with contextlib.suppress(OSError):  # the process has ended
            if (process / "cmdline").read_bytes().startswith(f"sglang::{part}".encode()):
                pids.append(int(process.name))
    return tuple(pids)


def stopped(group: int) -> tuple[int, ...]:
    """Return ids of processes stopped as by SIGSTOP; a process in tracing stop (debugger) does not count."""
    pids: list[int] = []
    for process in members(group):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "T":
            pids.append(int(process.name))
    return tuple(pids)
