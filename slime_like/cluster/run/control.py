"""Requests to a live run: a file in ``run.dir/control`` whose name is the request.

    touch run.dir/control/save        # or: python scripts/control.py run.dir save

Only the name of a file matters, not its content: requests are atomic, and a repeated request counts once. The loop reads
the folder once per rollout, removes the files and handles the requests; it reports progress in the live view and in
``status.json``. Removing a file before it is read withdraws the request. Anyone with write permission on the folder can
send requests; its mode follows the run's umask. SIGUSR2 to the driver is the request ``save``. SIGTERM, SIGHUP and Ctrl-C
stop the run like ``stop`` (``cluster.run.stop``). SIGUSR1 writes stacks.
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
MAX_NAME_LEN = 60  # characters printed of an unknown request
MAX_NAMES = 3


MAX_DIGITS = 4  # digits of a number of engines


class Request(StrEnum):
    """Requests to a run, in order of execution."""

    EVAL = "eval"
    SAVE = "save"
    REPORT = "report"
    ENGINES = "engines"
    STOP = "stop"


FORMS = tuple("engines=N" if request == Request.ENGINES else str(request) for request in Request)  # names of files


@dataclass(frozen=True, slots=True)
class RequestText:
    """A request as the name of its file: ``save``, ``engines=4``."""

    request: Request
    num_engines: int = 0  # requested number, with Request.ENGINES

    def __str__(self) -> str:
        return f"{self.request}={self.num_engines}" if self.num_engines else str(self.request)


def parse_request(name: str) -> RequestText | None:
    """Return the request that the file name ``name`` stands for; None if it stands for none."""
    kind, _, number = name.partition("=")
    if kind == Request.ENGINES:
        is_number = number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and number[0] != "0"
        return RequestText(Request.ENGINES, int(number)) if is_number else None
    return RequestText(Request(name)) if name in set(Request) else None


@dataclass(frozen=True, slots=True)
class _File:
    """One entry of the folder of requests."""

    name: str
    mtime: float
    owner: int
    is_folder: bool
    identity: tuple[int, int]


@dataclass(slots=True)
class Control:
    """The driver's side of run control: reads requests and reports their results.

    A bad request is reported once and does not end the run.
    """

    run_dir: Path
    say: Callable[[str], None]  # prints a line
    _status: RunStatus = field(default_factory=lambda: RunStatus(0, 0))
    _open: dict[Request, ControlReply] = field(default_factory=dict[Request, ControlReply])  # seen but unanswered
    num_engines: int = 0  # newest requested number
    _signalled: float | None = None
    # Name and identity of files that could not be removed.
    _unremovable: set[tuple[str, tuple[int, int]]] = field(default_factory=set[tuple[str, tuple[int, int]]])
    _warnings: set[str] = field(default_factory=set[str])
    _previous_handler: Any = None

    @property
    def folder(self) -> Path:
        """Folder of requests."""
        return self.run_dir / FOLDER

    def open(self, num_trained: int, num_rollouts: int) -> None:
        """Drop requests from before the run started, install the SIGUSR2 handler and write the run's status."""
        self._status = RunStatus(num_trained, num_rollouts)
        self._drop("it was requested before this run started")
        self._previous_handler = signal.signal(signal.SIGUSR2, self._on_signal)
        self._write()

    def read(self, num_trained: int) -> tuple[Request, ...]:
        """Read new requests; report and return all that are not answered yet, in order of execution.

        Several requests of one kind count as one: the newest. ``num_trained`` rollouts are trained so far.
        """
        self._status = replace(self._status, step=num_trained)
        for text, time_s, by in sorted(self._take(), key=lambda entry: entry[1]):
            if text.request == Request.ENGINES and (older := self._open.get(Request.ENGINES)) is not None:
                self._report(replace(older, state=DROPPED, detail=f"replaced by {text}"))
            self._open[text.request] = ControlReply(str(text), time_s, SEEN, num_trained, by=by)
            self.num_engines = text.num_engines or self.num_engines
        for answer in self._open.values():
            self._report(answer)
        self._write()
        return tuple(request for request in Request if request in self._open)

    def answer(self, request: Request, detail: str, *, failed: bool = False) -> None:
        """Report the result of a request that ``read`` returned."""
        self._report(replace(self._open.pop(request), state=FAILED if failed else DONE, detail=detail))

    def close(self) -> None:
        """Answer open requests as failed, drop unread ones, restore the signal handler and report the run as ended.

        Do nothing if ``open`` was not called.
        """
        if self._previous_handler is None:
            return
        signal.signal(signal.SIGUSR2, self._previous_handler)
        for request in tuple(self._open):
            self.answer(request, "the run ended first", failed=True)
        self._drop("the run has ended")
        self._status = replace(self._status, running=False)
        self._write()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = time.time()

    def _report(self, answer: ControlReply) -> None:
        self._status = self._status.with_answer(answer)
        by = f" (requested by {answer.by})" if answer.by else ""
        self.say(f"control: {answer.request}{by}: {answer.state}{f': {answer.detail}' if answer.detail else ''}")
        self._write()

    def _drop(self, detail: str) -> None:
        for text, time_s, by in self._take():
            self._report(ControlReply(str(text), time_s, DROPPED, self._status.step, detail, by))

    def _take(self) -> Iterator[tuple[RequestText, float, str]]:
        """Remove the folder's files; yield (request, time, user) for each file that is a request, and for SIGUSR2.

        For SIGUSR2 and for files of the user who runs this process, ``user`` is empty. Files that are not requests are
        reported as unknown.
        """
        if self._signalled is not None:
            yield RequestText(Request.SAVE), self._signalled, ""
            self._signalled = None
        unknown_files: list[_File] = []
        for file in self._files():
            if (file.name, file.identity) in self._unremovable or not self._remove(file):
                continue
            text = None if file.is_folder else parse_request(file.name)
            if text is None:
                unknown_files.append(file)
            else:
                yield text, file.mtime, "" if file.owner == os.geteuid() else _user(file.owner)
        if unknown_files:
            self._report_unknown(unknown_files)

    def _report_unknown(self, files: list[_File]) -> None:
        """Report all unknown requests in one message."""
        names = ", ".join(ascii(file.name)[:MAX_NAME_LEN] for file in files[:MAX_NAMES])
        suffix = f" and {len(files) - MAX_NAMES} more" if len(files) > MAX_NAMES else ""
        detail = f"unknown request: create an empty file named one of {', '.join(sorted(FORMS))}"
        self._report(ControlReply(f"{names}{suffix}", files[0].mtime, UNKNOWN, self._status.step, detail))

    def _files(self) -> list[_File]:
        try:
            self.folder.mkdir(exist_ok=True)
            return [file for entry in sorted(self.folder.iterdir()) for file in _read_entry(entry)]
        except OSError as error:
            self._warn(f"{self.folder} cannot be read ({error.strerror}): requests wait until it can be read")
            return []

    def _remove(self, file: _File) -> bool:
        """Remove the file; return False if its writer has withdrawn it. A file that cannot be removed is handled only once."""
        path = self.folder / file.name
        try:
            path.rmdir() if file.is_folder else path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._unremovable.add((file.name, file.identity))
            self._warn(f"{str(path)!a} cannot be removed ({error.strerror}): the request is handled only once")
        return True

    def _write(self) -> None:
        try:
            write_status(self.run_dir, self._status)
        except OSError as error:
            self._warn(f"{self.run_dir / 'status.json'} cannot be written ({error.strerror})")

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            self.say(f"control: {text}")


def _read_entry(path: Path) -> Iterator[_File]:
    """Yield the entry at ``path``; nothing if it was removed or is hidden, like files that editors and NFS create."""
    if path.name.startswith("."):
        return
    try:
        state = path.lstat()
    except FileNotFoundError:
        return
    is_folder = path.is_dir() and not path.is_symlink()
    yield _File(path.name, state.st_mtime, state.st_uid, is_folder, (state.st_ino, state.st_mtime_ns))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
