"""Requests to a run that is going on: a file in ``run.dir/control`` whose name says what is wanted.

    touch run.dir/control/save        # or: python scripts/control.py run.dir save

Only a file's name counts, never its content, so that no request is ever half written, and one that is written twice
before it is read is one. The loop reads the folder once per rollout, removes what it finds and does it; what it has seen
and done it says in the live view and in ``status.json``. Removing a file before it is read withdraws the request. Who may
write to the folder may ask: its mode is what the run's umask made it. SIGUSR2 to the driver is the request ``save``
(SIGUSR1 writes stacks, SIGTERM and Ctrl-C are ``stop``).
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

from slime_like.cluster.run.status import DONE, DROPPED, FAILED, SEEN, UNKNOWN, ControlReply, RunStatus, write_status

FOLDER = "control"
LONGEST_NAME = 60  # of a file that is no request, as it is shown
MOST_NAMES = 3


class Request(StrEnum):
    """What a run can be asked for, in the order in which it is done."""

    EVAL = "eval"
    SAVE = "save"
    REPORT = "report"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class _File:
    """One entry of the folder."""

    name: str
    written: float
    owner: int
    is_folder: bool
    identity: tuple[int, int]


@dataclass(slots=True)
class Control:
    """The run's side. Nothing here ends a run: what goes wrong with a request is said, once."""

    run_dir: Path
    say: Callable[[str], None]  # a line for people
    _status: RunStatus = field(default_factory=lambda: RunStatus(0, 0))
    _open: dict[Request, ControlReply] = field(default_factory=dict[Request, ControlReply])  # seen, not answered
    _signalled: float | None = None
    _stuck: set[tuple[str, tuple[int, int]]] = field(default_factory=set[tuple[str, tuple[int, int]]])  # not removable
    _troubles: set[str] = field(default_factory=set[str])
    _before: Any = None

    @property
    def folder(self) -> Path:
        """Where requests lie."""
        return self.run_dir / FOLDER

    def open(self, step: int, num_steps: int) -> None:
        """Begin: drop requests that were meant for an earlier part of the run, and listen to SIGUSR2."""
        self._status = RunStatus(step, num_steps)
        self._drop("it was asked for before this run began")
        self._before = signal.signal(signal.SIGUSR2, self._on_signal)
        self._write()

    def read(self, step: int) -> tuple[Request, ...]:
        """What was asked for since the last call, each once; ``step`` rollouts are trained on."""
        self._status = replace(self._status, step=step)
        for request, asked, by in self._take():
            self._open[request] = ControlReply(request, asked, SEEN, step, by=by)
        for answer in self._open.values():
            self._settle(answer)
        self._write()
        return tuple(request for request in Request if request in self._open)

    def answer(self, request: Request, detail: str, *, failed: bool = False) -> None:
        """Tell what became of a request that ``read`` gave."""
        self._settle(replace(self._open.pop(request), state=FAILED if failed else DONE, detail=detail))

    def close(self) -> None:
        """End: nothing that was asked for stays without an answer."""
        if self._before is None:
            return
        signal.signal(signal.SIGUSR2, self._before)
        for answer in tuple(self._open.values()):
            self.answer(Request(answer.request), "the run ended first", failed=True)
        self._drop("the run has ended")
        self._status = replace(self._status, running=False)
        self._write()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = time.time()

    def _settle(self, answer: ControlReply) -> None:
        self._status = self._status.with_answer(answer)
        by = f" (asked for by {answer.by})" if answer.by else ""
        self.say(f"control: {answer.request}{by}: {answer.state}{f': {answer.detail}' if answer.detail else ''}")
        self._write()

    def _drop(self, why: str) -> None:
        for request, asked, by in self._take():
            self._settle(ControlReply(request, asked, DROPPED, self._status.step, why, by))

    def _take(self) -> Iterator[tuple[Request, float, str]]:
        """Remove the files of the folder; what they and the signal ask for, when, and who if it is somebody else."""
        if self._signalled is not None:
            yield Request.SAVE, self._signalled, ""
            self._signalled = None
        unknown: list[_File] = []
        for file in self._files():
            if (file.name, file.identity) in self._stuck or not self._removed(file):
                continue
            if file.is_folder or file.name not in set(Request):
                unknown.append(file)
            else:
                yield Request(file.name), file.written, "" if file.owner == os.geteuid() else _user(file.owner)
        if unknown:
            self._tell_unknown(unknown)

    def _tell_unknown(self, files: list[_File]) -> None:
        """One message, however many they are."""
        names = ", ".join(ascii(file.name)[:LONGEST_NAME] for file in files[:MOST_NAMES])
        more = f" and {len(files) - MOST_NAMES} more" if len(files) > MOST_NAMES else ""
        detail = f"no request: ask for {', '.join(sorted(Request))} by an empty file of that name"
        self._settle(ControlReply(f"{names}{more}", files[0].written, UNKNOWN, self._status.step, detail))

    def _files(self) -> list[_File]:
        try:
            self.folder.mkdir(exist_ok=True)
            return [found for entry in sorted(self.folder.iterdir()) for found in _look_at(entry)]
        except OSError as error:
            self._trouble(f"{self.folder} cannot be read ({error.strerror}): requests are not seen until it can")
            return []

    def _removed(self, file: _File) -> bool:
        """Whether the file counts: it is gone now, or will not be seen again. False where its writer has withdrawn it."""
        path = self.folder / file.name
        try:
            path.rmdir() if file.is_folder else path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._stuck.add((file.name, file.identity))
            self._trouble(f"{str(path)!a} cannot be removed ({error.strerror}): it is taken once")
        return True

    def _write(self) -> None:
        try:
            write_status(self.run_dir, self._status)
        except OSError as error:
            self._trouble(f"{self.run_dir / 'status.json'} cannot be written ({error.strerror})")

    def _trouble(self, text: str) -> None:
        if text not in self._troubles:
            self._troubles.add(text)
            self.say(f"control: {text}")


def _look_at(path: Path) -> Iterator[_File]:
    """The entry as it is, a link for itself; nothing of a hidden one (editors, NFS) or of one that has gone meanwhile."""
    if path.name.startswith("."):
        return
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    is_folder = path.is_dir() and not path.is_symlink()
    yield _File(path.name, found.st_mtime, found.st_uid, is_folder, (found.st_ino, found.st_mtime_ns))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
