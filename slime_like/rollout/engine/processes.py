"""Processes of an engine, which form one process group: their state, shared memory and exit codes.

Named shared memory outlives processes that are killed: SGLang removes it only on a normal exit, and removes leftovers only
in its own CI. ``remove_segments`` is needed until SGLang's processes map unnamed memory, or their supervisor removes the names.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

LOG_LINES = 12
SHARED = Path("/dev/shm")
# Load statistics, messages between tensor parallel ranks, semaphores of multiprocessing, segments of CUDA and NCCL. Other files
# may be a user's, such as a model.
PREFIXES = ("sglang_loads_", "sgl_shm_", "sem.mp-", "cuda.shm.", "nccl-")
SCRATCH_PREFIX = "slime_like-engine-"  # prefix of an engine's temporary folder (its TMPDIR)


def members(group: int) -> Iterator[Path]:
    """Yield ``/proc/<pid>`` of each process in a process group."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                yield process
        except OSError:  # the process has ended
            continue


def pids_of_part(group: int, part: str) -> tuple[int, ...]:
    """Return the pids of an engine's processes of one kind.

    ``part`` is ``http server`` (the group leader), or the beginning of a name that SGLang gives its processes, such as
    ``detokenizer`` or ``scheduler``.
    """
    if part == "http server":
        return (group,)
    pids: list[int] = []
    for process in members(group):
        with contextlib.suppress(OSError):  # the process has ended
            if (process / "cmdline").read_bytes().startswith(f"sglang::{part}".encode()):
                pids.append(int(process.name))
    return tuple(pids)


def stopped_pids(group: int) -> tuple[int, ...]:
    """Return the pids of suspended processes (SIGSTOP). Processes stopped by a debugger are not included."""
    return tuple(int(process.name) for process in members(group) if _state(process)[0] == "T")


def rank_pids(group: int) -> tuple[int, ...]:
    """Return the pids of the ranks. Their child processes, which may be short-lived, are not included."""
    pids = pids_of_part(group, "scheduler")
    return tuple(pid for pid in pids if _state(Path(f"/proc/{pid}"))[1] not in pids)


def ended_pids(pids: Iterable[int]) -> tuple[int, ...]:
    """Return the ``pids`` whose processes have ended, including zombies."""
    return tuple(pid for pid in pids if _state(Path(f"/proc/{pid}"))[0] in ("", "Z", "X"))


def _state(process: Path) -> tuple[str, int]:
    """Return a process's state letter and its parent's pid from ``/proc/<pid>/stat``; ("", 0) if there is no such process."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def mapped_segments(group: int) -> frozenset[Path]:
    """Return the paths of named shared memory that the processes of a group have mapped; see ``segments_of``."""
    return segments_of(int(process.name) for process in members(group))


def segments_of(pids: Iterable[int]) -> frozenset[Path]:
    """Return the paths of named shared memory that processes have mapped: files in ``SHARED`` with one of ``PREFIXES``."""
    segments: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        paths = (Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line)
        segments |= {path for path in paths if path.parent == SHARED and path.name.startswith(PREFIXES)}
    return frozenset(segments)


def scratch_folders_of(pids: Iterable[int]) -> frozenset[Path]:
    """Return the temporary folders of engines, read from the environment of their processes."""
    scratch: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            folders = (Path(os.fsdecode(field[7:])) for field in fields if field.startswith(b"TMPDIR="))
            scratch |= {folder for folder in folders if folder.name.startswith(SCRATCH_PREFIX)}
    return frozenset(scratch)


def remove_segments(segments: Iterable[Path]) -> None:
    """Remove the files of ``segments``. Processes that have the memory mapped keep it."""
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.unlink()


def describe_exit(code: int) -> str:
    """Return an exit code of ``Popen`` in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def last_lines(path: str, begin: int = 0) -> list[str]:
    """Return the non-empty lines in the last 64 KiB of a log, ignoring its first ``begin`` bytes.

    If the log cannot be read, return one line with the reason.
    """
    try:
        text = Path(path).read_bytes()[begin:][-65_536:].decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    return [line for line in text.splitlines() if line.strip()]


def headline(lines: list[str]) -> str:
    """Return the line of a log that best explains a failure, preceded by ": "; empty if no line does.

    A plugin's message takes precedence: the plugin has stopped a worker, and the server's own errors are consequences.
    Next is the last exception of this project, then the last line that looks like an error among the last ``LOG_LINES``.
    """
    plugin = [line.strip() for line in lines if line.lstrip().startswith("slime_like plugin")]
    plugin += [line.strip() for line in lines if re.match(r"slime_like(_plugins)?\.[\w.]+: ", line)][-1:]
    errors = [line.strip() for line in lines[-LOG_LINES:] if re.match(r"\s*[\w.]+(Error|Exception|Exit)\b.*:", line)]
    return next((f": {line}" for line in (*plugin[:1], *errors[::-1])), "")
