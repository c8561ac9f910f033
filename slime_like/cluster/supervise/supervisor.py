"""The process that a user starts: it supervises the driver, its only child, and outlives it.

Ray ends its driver by itself when one of its own processes dies, and never returns from ``ray.init`` or ``ray.shutdown``
when one is stopped; the kernel may kill a driver that takes too much memory. The cause, the crash bundle and the end of
everything that was started must not depend on such a process. This one imports neither Ray nor torch.

It adopts what its descendants leave behind (``PR_SET_CHILD_SUBREAPER``), so that what a reward function has started ends with
the run as well. Signals are passed on. The driver has a process group of its own: Ctrl-C on a terminal reaches it once.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from slime_like.cluster.supervise import process_tree, supervised
from slime_like.cluster.supervise.crash import write_bundle
from slime_like.cluster.supervise.ray_watch import RayWatch
from slime_like.cluster.supervise.reporting import try_report
from slime_like.errors import ProcessLost, SlimeLikeError
from slime_like.printable import visible
from slime_like.rollout.engine.last_words import how
from slime_like.util.deadline import Deadline

TICK_S = 0.25
TOGETHER_S = 0.5  # between the ends of processes of which one took the others along
TAKEDOWN_S = 300.0  # for all of it: processes have a shorter limit of their own
UNWIND_S = 15.0  # from a second signal to the moment at which the driver begins to take its run down
ALONE_S = 15.0  # for the driver, once all others are killed that it may wait for
ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to end the run
PASSED_ON = (*ASKS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPED_CODE = 130


def supervise(run: Callable[[], int]) -> int:
    """Call ``run``, which is the driver, in a child process; returns its exit code, or that of its irregular end."""
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    # Inherited as ignored, the kernel would take the exit codes.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    others = process_tree.children()  # of a program that calls this: none of the run's
    adopting = process_tree.adopt()
    driver = os.fork()
    if driver == 0:
        ours.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        supervised.drive(run, theirs)
    theirs.close()
    try:
        return Supervisor(driver, ours, others).watch(before)
    finally:
        signal.signal(signal.SIGCHLD, reaping)
        process_tree.adopt(adopting)


@dataclass(slots=True)
class _Limit:
    deadline: Deadline
    waits_for: str
    at_once: bool


@dataclass(slots=True)
class DriverState:
    """State of the driver, as it has reported it."""

    run_dir: Path | None = None
    folders: list[Path] = field(default_factory=list[Path])  # to remove at the end
    logs: Path | None = None
    limits: dict[int, _Limit] = field(default_factory=dict[int, _Limit])
    ending: int | None = None  # the exit code that is meant
    suspects: float | None = None  # when it asked whether Ray is alive
    done: bool = False


class Supervisor:
    """Watches one driver until it has ended, and everything it has started with it."""

    def __init__(self, driver: int, line: socket.socket, others: frozenset[psutil.Process]) -> None:
        self._driver, self._line, self._others = driver, line, others
        self._status: int | None = None  # exit code of the driver, as ``Popen.returncode``
        self._state = DriverState()
        self._buffer = b""
        self._signals: list[int] = []
        self._unwind: Deadline | None = None
        self._takedown: Deadline | None = None
        self._alone: Deadline | None = None
        self._selector = selectors.DefaultSelector()
        self._ray = RayWatch(self._selector)

    def watch(self, mask: Collection[int]) -> int:
        """Watch the run to its end and return its exit code. ``mask``: signals that were blocked before the fork."""
        wakes, woken = socket.socketpair()
        for end in (wakes, woken, self._line):
            end.setblocking(False)
        self._selector.register(self._line, selectors.EVENT_READ, self._read)
        self._selector.register(wakes, selectors.EVENT_READ, lambda: self._signalled(wakes.recv(4096)))
        fd = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        handled = [n for n in (*PASSED_ON, signal.SIGCHLD, signal.SIGTSTP) if signal.getsignal(n) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            code: int | None = None
            while code is None:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._reap()
                code = self._judge()
            return code
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for end in (wakes, woken, self._line):
                end.close()

    def _judge(self) -> int | None:
        """Return the exit code once the run has ended and everything of it is gone; None until then."""
        if self._status is not None:
            return self._driver_ended(self._status)
        if self._state.ending is None:
            return self._fault()
        self._takedown = self._takedown or Deadline("driver", "teardown", TAKEDOWN_S)
        late = next(self._late(), None)
        if self._takedown.elapsed() > self._takedown.limit:
            late = late or str(self._takedown.exceeded("the end of the run"))
        if self._alone is None and late is not None:
            _say(f"{late}; everything that this run has started is killed")
            process_tree.kill(
                process for process in process_tree.descendants(self._others) if process.pid != self._driver
            )
            self._alone = Deadline("driver", "teardown", ALONE_S)
        if self._alone is not None and self._alone.elapsed() > self._alone.limit:
            return self._close(self._state.ending)
        return None

    def _fault(self) -> int | None:
        """Return the exit code where a signal, a dead process of Ray or a late wait ends the run; None otherwise."""
        if self._signals and any(limit.at_once for limit in self._state.limits.values()):
            _say(f"stopped while it waited for {next(iter(self._state.limits.values())).waits_for}")
            return self._close(STOPPED_CODE)
        if self._unwind is not None and self._unwind.elapsed() > self._unwind.limit:
            _say("stopped: the driver did not react, everything that this run has started is killed")
            return self._close(STOPPED_CODE)
        if (lost := self._ray.lost()) and self._state.run_dir is not None:
            self._to_driver(signal.SIGSTOP)  # or it blames the process that dies next, and writes a bundle of that one
            if self._driver_dies():
                return self._driver_ended(self._status or 0)
            self._end_driver()
            return self._fail(ProcessLost(f"{', '.join(lost)}: Ray cannot go on; the same command continues the run"))
        if (late := next(self._late(), None)) is not None:
            return self._fail(SlimeLikeError(late))
        self._clear_ray()
        return None

    def _clear_ray(self) -> None:
        """Answer a driver that has lost an actor, once a death of Ray would have been seen."""
        asked = self._state.suspects
        if asked is not None and time.monotonic() - asked > TOGETHER_S:
            self._state.suspects = None
            with suppress(OSError):
                self._line.send(b".")

    def _driver_ended(self, status: int) -> int:
        self._read()
        if self._state.done:
            return self._close(status)
        if self._state.ending is not None:
            _say(f"the driver {how(status)} while it took the run down")
            return self._close(self._state.ending)
        if -status in ASKS:
            _say("stopped")
            return self._close(STOPPED_CODE)
        why = (
            ": too little memory? (dmesg lists the processes that the kernel killed)"
            if status == -signal.SIGKILL
            else ""
        )
        self._driver_dies()  # what of Ray is dead is known a moment later
        for key, _ in self._selector.select(0):
            key.data()
        # A driver that is killed takes Ray along (PR_SET_PDEATHSIG), one that Ray ends exits or aborts.
        cause = f"{', '.join(self._ray.dead)}: " if self._ray.dead and status != -signal.SIGKILL else ""
        return self._fail(
            ProcessLost(
                f"{cause}the driver (process {self._driver}) {how(status)}{why}; the same command continues the run"
            )
        )

    def _driver_dies(self) -> bool:
        """Return True if the driver ends within ``TOGETHER_S``, as it does when Ray ends it."""
        until = time.monotonic() + TOGETHER_S
        while time.monotonic() < until:
            self._reap()
            time.sleep(process_tree.WAIT_S)
        return self._status is not None

    def _fail(self, error: SlimeLikeError) -> int:
        """Cause and crash bundle first, then the end of everything."""
        run_dir = self._state.run_dir
        text = f"{type(error).__name__}: {error}"
        if run_dir is not None:
            try:
                text += f"\ncrash bundle: {write_bundle(run_dir, error, (), self._state.logs)}"
            except Exception as failure:  # noqa: BLE001  the fault boundary of the evidence
                text += f"\ncrash bundle: could not be written ({type(failure).__name__}: {failure})"
        _say(text)
        return self._close(1)

    def _close(self, code: int) -> int:
        """Kill everything that the run has started; return ``code``."""
        deadline = Deadline("supervisor", "teardown", process_tree.END_S)
        self._end_driver(deadline)
        while left := process_tree.descendants(self._others):
            if deadline.elapsed() > deadline.limit:
                _say("killed, and not gone: " + ", ".join(f"process {p.pid} ({process_tree.command(p)})" for p in left))
                break
            process_tree.kill(left)
            self._reap()
            time.sleep(process_tree.WAIT_S)
        for folder in self._state.folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not self._state.done and self._state.run_dir is not None:
            try_report(self._state.run_dir)
        return code

    def _end_driver(self, deadline: Deadline | None = None) -> None:
        """Kill the driver. One that a disk or a device keeps from dying is left to the kernel when ``deadline`` is over."""
        deadline = deadline or Deadline("supervisor", "teardown", process_tree.END_S)
        self._to_driver(signal.SIGKILL)
        while self._status is None and deadline.elapsed() < deadline.limit:
            self._reap()
            time.sleep(process_tree.WAIT_S)

    def _reap(self) -> None:
        """Reap every child of the run that has ended, adopted ones too."""
        for child in process_tree.children() - self._others:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid == self._driver:
                    self._status = os.waitstatus_to_exitcode(status)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in ASKS:
                self._signals.append(number)
                if len(self._signals) == 2:
                    self._unwind = Deadline("driver", "teardown", UNWIND_S)
            if number == signal.SIGTSTP:  # Ctrl-Z
                self._to_driver(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._to_driver(signal.SIGCONT)
            elif number in PASSED_ON:
                self._to_driver(number)

    def _to_driver(self, number: int) -> None:
        if self._status is None:  # not reaped: the id is still its own
            os.kill(self._driver, number)

    def _read(self) -> None:
        """Read the notes that the driver has sent."""
        with suppress(OSError):
            while data := self._line.recv(65_536):
                self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, note: dict[str, Any]) -> None:
        state = self._state
        match note["kind"]:
            case "claimed":
                state.run_dir = Path(note["run_dir"])
            case "owns":
                state.folders.append(Path(note["folder"]))
            case "ray":
                state.logs = None if note["logs"] is None else Path(note["logs"])
                for name, pid in note["pids"].items():
                    self._ray.add(name, pid)
            case "begin":
                deadline = Deadline(note["owner"], note["phase"], note["seconds"])
                state.limits[note["number"]] = _Limit(deadline, note["waits_for"], note["at_once"])
            case "end":
                state.limits.pop(note["number"], None)
            case "ending":
                state.ending = note["code"]
            case "suspects":
                state.suspects = time.monotonic()
            case "done":
                state.done = True
            case kind:
                raise AssertionError(f"a note of kind {kind!r}")

    def _late(self) -> Iterator[str]:
        """Yield a message for each wait of the driver that is longer than its limit."""
        for limit in self._state.limits.values():
            if limit.deadline.elapsed() > limit.deadline.limit:
                yield str(limit.deadline.exceeded(limit.waits_for))


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(visible(f"{text}\n"))
        sys.stderr.flush()
