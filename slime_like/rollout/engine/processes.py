"""The living processes of an engine, all in one process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def members(group: int) -> Iterator[Path]:
    """``/proc/<pid>`` of each process of a group."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                yield process
        except OSError:  # ended meanwhile
            continue


def parts(group: int, part: str) -> tuple[int, ...]:
    """Processes of one kind: ``http server`` leads the group, a ``detokenizer`` or ``scheduler`` has its kind in its title."""
    if part == "http server":
        return (group,)
    found: list[int] = []
    for process in members(group):
        with contextlib.suppress(OSError):  # ended meanwhile
            if (process / "cmdline").read_bytes().startswith(f"sglang::{part}".encode()):
                found.append(int(process.name))
    return tuple(found)


def stopped(group: int) -> tuple[int, ...]:
    """Those that are stopped, as by SIGSTOP; one that a debugger holds for a moment is not."""
    found: list[int] = []
    for process in members(group):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "T":
            found.append(int(process.name))
    return tuple(found)
