"""The process started by the user: supervises its only child, the driver, and outlives it.

Ray kills its driver when a Ray process dies, and ``ray.init`` and ``ray.shutdown`` never return while one is stopped; the
kernel may kill a driver that uses too much memory. Error message, crash bundle and cleanup must not depend on the
driver. The supervisor imports neither Ray nor torch.

It adopts orphaned descendants (``PR_SET_CHILD_SUBREAPER``), so that processes started by a reward function end with the run
too. It forwards signals. The driver has a separate process group, so that Ctrl-C on a terminal reaches it once.
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
from slime_like.rollout.engine.processes import describe_exit
from slime_like.util.deadline import Deadline

TICK_S = 0.25
TOGETHER_S = 0.5  # maximum time between the death of a process and the deaths that it causes
TAKEDOWN_S = 300.0  # in total: single processes have shorter limits
UNWIND_S = 15.0  # from a second signal until the driver begins its teardown
ALONE_S = 15.0  # for the driver, once all processes it may wait for are killed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPED_CODE = 130


def supervise(run: Callable[[], int]) -> int:
    """Run the driver ``run`` in a child process; return its exit code, or the one for an abnormal end."""
    parent_end, driver_end = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # If SIGCHLD were inherited as ignored, the kernel would discard exit codes.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spared = process_tree.children()  # children of a calling program, not of the run
    adopting = process_tree.adopt()
    driver = os.fork()
    if driver == 0:
        parent_end.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        supervised.drive(run, driver_end)
    driver_end.close()
    try:
        return Supervisor(driver, parent_end, spared).watch(old_mask)
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
    """State reported by the driver."""

    run_dir: Path | None = None
    folders: list[Path] = field(default_factory=list[Path])  # to remove at the end
    logs: Path | None = None
    limits: dict[int, _Limit] = field(default_factory=dict[int, _Limit])
    ending: int | None = None  # exit code, once the teardown has begun
    suspects: float | None = None  # time at which it requested a check of Ray
    done: bool = False


class Supervisor:
    """Watches one driver and its descendants until all have ended."""

    def __init__(self, driver: int, line: socket.socket, spared: frozenset[psutil.Process]) -> None:
        self._driver, self._line, self._spared = driver, line, spared
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
        """Watch the run to its end and return its exit code. ``mask``: the signal mask from before the fork."""
        wakes, woken = socket.socketpair()
        for end in (wakes, woken, self._line):
            end.setblocking(False)
        self._selector.register(self._line, selectors.EVENT_READ, self._read)
        self._selector.register(wakes, selectors.EVENT_READ, lambda: self._signalled(wakes.recv(4096)))
        fd = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        handled = [n for n in (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP) if signal.getsignal(n) is not signal.SIG_IGN]
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
        """Return the exit code once all processes of the run have ended; None until then."""
        if self._status is not None:
            return self._driver_ended(self._status)
        if self._state.ending is None:
            return self._fault()
        self._takedown = self._takedown or Deadline("driver", "teardown", TAKEDOWN_S)
        timeout_text = next(self._expired(), None)
        if self._takedown.elapsed() > self._takedown.limit:
            timeout_text = timeout_text or str(self._takedown.exceeded("the end of the run"))
        if self._alone is None and timeout_text is not None:
            _say(f"{timeout_text}; all processes of this run are killed")
            process_tree.kill(
                process for process in process_tree.descendants(self._spared) if process.pid != self._driver
            )
            self._alone = Deadline("driver", "teardown", ALONE_S)
        if self._alone is not None and self._alone.elapsed() > self._alone.limit:
            return self._close(self._state.ending)
        return None

    def _fault(self) -> int | None:
        """Return the exit code if a signal, a dead Ray process or an expired deadline ends the run, else None."""
        if self._signals and any(limit.at_once for limit in self._state.limits.values()):
            _say(f"stopped while it waited for {next(iter(self._state.limits.values())).waits_for}")
            return self._close(STOPPED_CODE)
        if self._unwind is not None and self._unwind.elapsed() > self._unwind.limit:
            _say("stopped: the driver did not react; all processes of this run are killed")
            return self._close(STOPPED_CODE)
        if (ray_problems := self._ray.lost()) and self._state.run_dir is not None:
            self._to_driver(
                signal.SIGSTOP
            )  # otherwise it would write its own crash bundle that blames the next dying process
            if self._driver_dies():
                return self._driver_ended(self._status or 0)
            self._end_driver()
            return self._fail(
                ProcessLost(f"{', '.join(ray_problems)}: Ray cannot continue; the same command resumes the run")
            )
        if (timeout_text := next(self._expired(), None)) is not None:
            return self._fail(SlimeLikeError(timeout_text))
        self._clear_ray()
        return None

    def _clear_ray(self) -> None:
        """Confirm to a driver that lost an actor that Ray is alive, after the time to detect its death."""
        requested_at = self._state.suspects
        if requested_at is not None and time.monotonic() - requested_at > TOGETHER_S:
            self._state.suspects = None
            with suppress(OSError):
                self._line.send(b".")

    def _driver_ended(self, status: int) -> int:
        self._read()
        if self._state.done:
            return self._close(status)
        if self._state.ending is not None:
            _say(f"the driver {describe_exit(status)} during shutdown")
            return self._close(self._state.ending)
        if -status in STOP_SIGNALS:
            _say("stopped")
            return self._close(STOPPED_CODE)
        hint = (
            ": too little memory? (dmesg lists the processes that the kernel killed)"
            if status == -signal.SIGKILL
            else ""
        )
        self._driver_dies()  # deaths of Ray processes are detected with a delay
        for key, _ in self._selector.select(0):
            key.data()
        # A killed driver takes Ray along (PR_SET_PDEATHSIG); a driver ended by Ray exits or aborts.
        cause = f"{', '.join(self._ray.dead)}: " if self._ray.dead and status != -signal.SIGKILL else ""
        return self._fail(
            ProcessLost(
                f"{cause}the driver (process {self._driver}) {describe_exit(status)}{hint}; the same command resumes the run"
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
        """Print the cause, write the crash bundle, then kill everything."""
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
        """Kill all processes of the run; return ``code``."""
        deadline = Deadline("supervisor", "teardown", process_tree.END_S)
        self._end_driver(deadline)
        while remaining := process_tree.descendants(self._spared):
            if deadline.elapsed() > deadline.limit:
                _say(
                    "killed but still present: "
                    + ", ".join(f"process {p.pid} ({process_tree.command(p)})" for p in remaining)
                )
                break
            process_tree.kill(remaining)
            self._reap()
            time.sleep(process_tree.WAIT_S)
        for folder in self._state.folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not self._state.done and self._state.run_dir is not None:
            try_report(self._state.run_dir)
        return code

    def _end_driver(self, deadline: Deadline | None = None) -> None:
        """Kill the driver. If a disk or device blocks its exit until ``deadline``, leave it to the kernel."""
        deadline = deadline or Deadline("supervisor", "teardown", process_tree.END_S)
        self._to_driver(signal.SIGKILL)
        while self._status is None and deadline.elapsed() < deadline.limit:
            self._reap()
            time.sleep(process_tree.WAIT_S)

    def _reap(self) -> None:
        """Reap every ended child of the run, including adopted ones."""
        for child in process_tree.children() - self._spared:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid == self._driver:
                    self._status = os.waitstatus_to_exitcode(status)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._signals.append(number)
                if len(self._signals) == 2:
                    self._unwind = Deadline("driver", "teardown", UNWIND_S)
            if number == signal.SIGTSTP:  # Ctrl-Z
                self._to_driver(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._to_driver(signal.SIGCONT)
            elif number in FORWARDED:
                self._to_driver(number)

    def _to_driver(self, number: int) -> None:
        if self._status is None:  # not reaped, so the process id is still valid
            os.kill(self._driver, number)

    def _read(self) -> None:
        """Read messages from the driver."""
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
                raise AssertionError(f"unknown note {kind!r}")

    def _expired(self) -> Iterator[str]:
        """Yield a message for each wait of the driver that exceeds its limit."""
        for limit in self._state.limits.values():
            if limit.deadline.elapsed() > limit.deadline.limit:
                yield str(limit.deadline.exceeded(limit.waits_for))


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(visible(f"{text}\n"))
        sys.stderr.flush()
