"""What a run left behind: processes (their ports go with them) and names in /dev/shm.

Every process of a run inherits a mark in its environment, so that those of other runs on the machine are told apart.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from slime_like.deadline import Deadline

MARK = "SLIME_LIKE_TEST_RUN"  # environment variable
GONE_S = 30.0  # for the processes of a run to be gone after it
SHARED = Path("/dev/shm")


def leftovers(mark: str, shared: set[Path], *, died: bool) -> list[str]:
    """Processes of a run, and which of the names in ``shared`` there are; a moment after its end.

    A driver that was killed (``died``) leaves the rings of its ranks to the next part, which removes them, and Ray's own
    agents, which notice the end of their raylet in a minute or more.
    """
    deadline = Deadline("test", "leftovers", GONE_S)
    while alive := [pid for pid in processes(mark) if not (died and is_agent(pid))]:
        if deadline.elapsed() > deadline.limit:
            break
        time.sleep(0.2)
    names = [
        path for path in sorted(shared) if path.exists() and not (died and path.parts[3].startswith("slime_like."))
    ]
    return [*(f"process {pid}: {command(pid)}" for pid in alive), *map(str, names)]


def processes(mark: str) -> list[int]:
    """Living processes whose environment has ``mark``, but this one."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and state != "Z":
            found.append(int(process.name))
    return found


def is_agent(pid: int) -> bool:
    """Whether a process is one of Ray's agents."""
    text = command(pid)
    return not text or text.startswith(("ray::RuntimeEnvAgent", "ray::DashboardAgent"))


def command(pid: int) -> str:
    """What a process was started as; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return ""


def mapped(mark: str) -> set[Path]:
    """Names in /dev/shm that processes of a run have mapped, and the folders that these are in."""
    found: set[Path] = set()
    for pid in processes(mark):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line}
    return {
        name
        for path in found
        if not path.name.endswith("(deleted)")
        for name in (path, *path.parents)
        if len(name.parts) > 3
    }
