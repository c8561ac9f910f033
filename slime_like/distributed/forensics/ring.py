"""Ring buffer of a rank's last ops, in memory that other processes of the node can read after a hang or crash.

An op is a collective, a send, a receive, or a composite of these.

A ring is a file in ``/dev/shm`` that its rank has mapped: an op is recorded by two writes to memory, without a system
call. ``slime_like.distributed.forensics.report`` reads it. This module does not import torch, because the driver reads
rings too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import OPS, Op
from slime_like.util.private import create_private, private_folder

SHARED = Path("/dev/shm")
PREFIX = "slime_like."
MAGIC = 0x51_6C_69_6D_65_02
# Size of the head in bytes. Its 8-byte words: magic, pid, start time of the process, slots, pid namespace of the process,
# number of rebuilds, then the last memory query: free bytes, bytes held by the process, total bytes, time.
HEAD = 128
RECORD = struct.Struct("7q")  # index, started ns, ended ns, bytes, code, sequence, peer
REBUILDS, FREE, HELD, TOTAL, QUERIED = 5, 6, 7, 8, 9  # words of the head
ENDED, FAILED = 2, -1  # position of the end time in a record; its value if the op failed
OP_BITS, PHASE_BITS = 8, 8
GROUP_SHIFT = OP_BITS + PHASE_BITS  # in a code, the group's number is in the bits above op and phase
ELSEWHERE = "in another container"  # state of a process whose pid belongs to another namespace
CODES = {op.name: number for number, op in enumerate(OPS)}


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group, as described to readers of the ring."""

    number: int  # on this rank
    name: str  # the same on every rank
    label: str
    ranks: tuple[int, ...]  # global, in the order of the group
    foreign: bool = False  # its other ranks are outside the trainer's world


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op that a rank issued."""

    index: int
    started_ns: int
    ended_ns: int  # 0 if in flight, FAILED if failed
    num_bytes: int
    op: Op
    phase: str
    group: GroupInfo
    # Number among the group's collectives, or among the sends to (receives from) ``peer``; for a composite, among its calls.
    sequence: int
    peer: int | None  # the other rank of a send or receive, as a rank of the group; -1: any rank

    @property
    def in_flight(self) -> bool:
        """Return whether the op has not ended."""
        return self.ended_ns == 0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Result of a rank's last memory query, in bytes."""

    free: int
    process_bytes: int  # held by the rank's process
    total: int
    query_ns: int  # time of the query, in ns of perf_counter_ns

    def describe(self, now_ns: int) -> str:
        """Return the age and the values of the query as text."""
        return (
            f"memory {(now_ns - self.query_ns) / 1e9:.1f} s ago: {self.free / 2**30:.2f} of {self.total / 2**30:.2f} GiB "
            f"free, it held {self.process_bytes / 2**30:.2f}"
        )


class Ring:
    """The ring of this rank, for writing. With ``folder=None`` it is in private memory, which no other process can read."""

    def __init__(self, folder: Path | None, name: str, slots: int) -> None:
        """Create the ring. ``slots`` is rounded up to a power of two.

        Raises ``SlimeLikeError`` if ``folder`` is not a private folder of this user, and ``OSError`` if it cannot be written.
        """
        self.slots = 1 << max(0, slots - 1).bit_length()
        size = HEAD + self.slots * RECORD.size
        self.folder = folder
        self.path = None if folder is None else folder / f"{name}.ring"
        if self.path is None:
            self.memory = mmap.mmap(-1, size)
        else:
            private_folder(self.path.parent)
            with create_private(self.path) as file:
                file.truncate(size)
                self.memory = mmap.mmap(file.fileno(), size)
        self.words = memoryview(self.memory).cast("q")
        self.words[1], self.words[2], self.words[3] = os.getpid(), start_time(os.getpid()), self.slots
        self.words[4] = pid_namespace()
        self.words[0] = MAGIC
        # ``next_record`` returns the next op's index, the offset of its record in bytes, and the word for its end time.
        offsets = [self.first_word(slot) * 8 for slot in range(self.slots)]
        ends = [self.first_word(slot) + ENDED for slot in range(self.slots)]
        self.next_record: Callable[[], tuple[int, int, int]] = zip(
            itertools.count(), itertools.cycle(offsets), itertools.cycle(ends), strict=False
        ).__next__
        self.before_close: Callable[[], object] = lambda: None  # releases other references to the memory
        self._groups: list[GroupInfo] = []
        self._phases: dict[str, int] = {}

    @property
    def num_groups(self) -> int:
        """Number of groups added so far; the next group gets this number."""
        return len(self._groups)

    def first_word(self, index: int) -> int:
        """Return the position in ``words`` at which the record of op ``index`` begins."""
        return (HEAD + (index & (self.slots - 1)) * RECORD.size) // 8

    def add_group(self, info: GroupInfo) -> None:
        """Add a group and publish its description to readers."""
        self._groups.append(info)
        self._write_description()

    def phase_number(self, name: str) -> int:
        """Return the number of phase ``name``. If the phase is new, give it a number and publish its name to readers first."""
        if name not in self._phases:
            self._phases[name] = len(self._phases) % (1 << PHASE_BITS)
            self._write_description()
        return self._phases[name]

    def _write_description(self) -> None:
        if self.path is None:
            return
        groups = [[g.number, g.name, g.label, list(g.ranks), g.foreign] for g in self._groups]
        text = json.dumps({"groups": groups, "phases": list(self._phases)})
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.rename(self.path.with_suffix(".json"))

    def fail_in_flight(self, group: int) -> None:
        """Mark the unfinished ops of group number ``group`` as failed."""
        width = RECORD.size // 8
        first = self.first_word(0)
        for start in range(first, first + self.slots * width, width):
            if (
                self.words[start + 1]
                and not self.words[start + ENDED]
                and self.words[start + 4] >> GROUP_SHIFT == group
            ):
                self.words[start + ENDED] = FAILED

    def record_rebuild(self, number: int) -> None:
        """Record that this rank starts the ``number``-th rebuild of its communicators."""
        self.words[REBUILDS] = number

    def record_free(self, num_bytes: int, total: int) -> None:
        """Record the result of a query of free memory, with the current time."""
        self.words[FREE], self.words[TOTAL], self.words[QUERIED] = num_bytes, total, time.perf_counter_ns()

    def record_held(self, num_bytes: int) -> None:
        """Record the memory held by this process."""
        self.words[HELD] = num_bytes

    def memory_state(self) -> MemoryState | None:
        """Return the recorded result of the last query of free memory, or None if there was no query."""
        words = self.words
        return MemoryState(words[FREE], words[HELD], words[TOTAL], words[QUERIED]) if words[QUERIED] else None

    def close(self) -> None:
        """Release the memory, and remove the ring's files and then the folder if it is empty."""
        self.before_close()
        self.words.release()
        self.memory.close()
        if self.path is not None and self.folder is not None:
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or removed by another rank
                self.folder.rmdir()


@dataclass(frozen=True, slots=True)
class Reading:
    """Contents of a ring, read from its files."""

    name: str  # such as trainer_rank1
    pid: int
    state: str  # running, stopped, dead or ELSEWHERE
    records: tuple[OpRecord, ...]  # oldest first
    rebuilds: int = 0  # number of rebuilds of communicators that the process started
    memory: MemoryState | None = None  # None: never queried

    @property
    def is_lost(self) -> bool:
        """Return whether the process is stopped (by SIGSTOP or a debugger) or dead; False if its pid namespace hides that."""
        return self.state in ("stopped", "dead")


def read_rings(folder: Path) -> dict[str, Reading]:
    """Return every complete ring of ``folder`` by name."""
    return {path.stem: reading for path in sorted(folder.glob("*.ring")) if (reading := _read(path)) is not None}


def _read(path: Path) -> Reading | None:
    try:
        data = path.read_bytes()
    except OSError:  # removed since it was listed
        return None
    try:
        description = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        description = {"groups": [], "phases": []}
    if len(data) < HEAD or struct.unpack_from("=q", data)[0] != MAGIC:
        return None
    _, pid, start_ticks, slots, namespace, rebuilds, free, process_bytes, total, query_ns = struct.unpack_from(
        "=10q", data
    )
    groups = {
        number: GroupInfo(number, name, label, tuple(r), f) for number, name, label, r, f in description["groups"]
    }
    records = sorted(_records(data, slots, groups, description["phases"]), key=lambda record: record.index)
    memory = MemoryState(free, process_bytes, total, query_ns) if query_ns else None
    state = process_state(pid, start_ticks) if namespace == pid_namespace() else ELSEWHERE
    return Reading(path.stem, pid, state, tuple(records), rebuilds, memory)


def _records(data: bytes, slots: int, groups: dict[int, GroupInfo], phases: list[str]) -> Iterator[OpRecord]:
    for slot in range(slots):
        index, start_ns, end_ns, size, code, sequence, peer = RECORD.unpack_from(data, HEAD + slot * RECORD.size)
        op, phase = code & ((1 << OP_BITS) - 1), (code >> OP_BITS) & ((1 << PHASE_BITS) - 1)
        number = code >> (OP_BITS + PHASE_BITS)
        if not start_ns or op >= len(OPS) or number not in groups:
            continue
        name = phases[phase] if phase < len(phases) else "?"
        peer_or_none = None if peer == NO_PEER else peer
        yield OpRecord(index, start_ns, end_ns, size, OPS[op], name, groups[number], sequence, peer_or_none)


NO_PEER = -2


def process_state(pid: int, start_ticks: int) -> str:
    """Return the state of the process with this id and start time: running, stopped (by SIGSTOP or a debugger) or dead."""
    state, since = _stat(pid)
    return (
        {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(state, "running")
        if since == start_ticks
        else "dead"
    )


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or -1 if it does not exist.

    If a pid is reused, the new process has a later start time.
    """
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and start time of a process, or ``("X", -1)`` if it does not exist.

    One read gives both, because the process may end between two reads.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", -1
    return fields[0], int(fields[19])


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace, or 0 if unknown. Containers with a common /dev/shm may differ in it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def sweep(shared: Path = SHARED, keep: Path | None = None) -> list[Path]:
    """Remove this user's ring folders whose processes are all dead, left behind by killed runs. Return their paths.

    ``keep``: a folder to leave in place, because this process and others are about to use it.
    """
    removed_folders: list[Path] = []
    for folder in shared.glob(f"{PREFIX}*"):
        rings = list(folder.glob("*.ring"))
        if folder != keep and _is_own(folder) and rings and not any(_is_alive(path) for path in rings):
            shutil.rmtree(folder, ignore_errors=True)
            removed_folders.append(folder)
    return removed_folders


def _is_own(folder: Path) -> bool:
    try:
        state = folder.lstat()
    except OSError:  # removed in the meantime
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()


def _is_alive(path: Path) -> bool:
    try:
        head = path.read_bytes()[:HEAD]
    except OSError:
        return False
    if len(head) < HEAD:
        return True  # another process is creating it
    magic, pid, start_ticks, _, namespace = struct.unpack_from("=5q", head)
    if magic != MAGIC or namespace != pid_namespace():
        return True  # another process is creating it, or it belongs to a container whose processes are not visible here
    return process_state(pid, start_ticks) != "dead"
