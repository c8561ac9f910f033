"""The process that the user starts: it forks the driver, supervises it and outlives it.

Error message, crash bundle and cleanup must not depend on the driver: Ray kills its driver when a Ray process dies,
``ray.init`` and ``ray.shutdown`` never return while a Ray process is suspended, and the kernel may kill a driver that uses
too much memory. The supervisor imports neither Ray nor torch.

It adopts orphaned descendants (``PR_SET_CHILD_SUBREAPER``), so that processes started by a reward function end with the
run too. It forwards signals. The driver has a separate process group, so that Ctrl-C on a terminal reaches it once.
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
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from slime_like.cluster.supervise import driver_link, process_tree
from slime_like.cluster.supervise.crash import write_bundle
from slime_like.cluster.supervise.driver_state import DriverState
from slime_like.cluster.supervise.ray_watch import RayWatch
from slime_like.cluster.supervise.reporting import try_report
from slime_like.errors import ProcessLost, SlimeLikeError
from slime_like.printable import visible
from slime_like.rollout.engine.processes import describe_exit
from slime_like.util.deadline import Deadline

TICK_S = 0.25
TOGETHER_S = 0.5  # maximum time between the death of a process and the deaths that it causes
TEARDOWN_S = 300.0  # in total: single processes have shorter limits
UNWIND_S = 15.0  # from a second signal until the driver begins its teardown
ALONE_S = 15.0  # for the driver to end once all processes that it may wait for have been killed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPED_CODE = 130


def supervise(run: Callable[[], int]) -> int:
    """Run the driver ``run`` in a forked child process and return its exit code. Call it from the main thread.

    If the driver ends abnormally or is killed, return the code that it reported at the start of its teardown. Without such
    a code, return 130 if the run was stopped, otherwise 1.
    """
    parent_end, driver_end = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # If SIGCHLD were inherited as ignored, the kernel would discard exit codes.
    sigchld_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    excluded = process_tree.children()  # children of a calling program, not of the run
    was_adopting = process_tree.adopt()
    driver = os.fork()
    if driver == 0:
        parent_end.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        driver_link.drive(run, driver_end)
    driver_end.close()
    try:
        return Supervisor(driver, parent_end, excluded).watch(old_mask)
    finally:
        signal.signal(signal.SIGCHLD, sigchld_handler)
        process_tree.adopt(was_adopting)


class Supervisor:
    """Supervisor of one driver and its descendants until all have ended."""

    def __init__(self, driver: int, line: socket.socket, excluded: frozenset[psutil.Process]) -> None:
        self._driver, self._line, self._excluded = driver, line, excluded
        self._driver_status: int | None = None  # exit code of the driver, as ``Popen.returncode``
        self._state = DriverState()
        self._buffer = b""
        self._signals: list[int] = []
        self._unwind_deadline: Deadline | None = None
        self._teardown_deadline: Deadline | None = None
        self._driver_deadline: Deadline | None = None
        self._selector = selectors.DefaultSelector()
        self._ray = RayWatch(self._selector)

    def watch(self, mask: Collection[int]) -> int:
        """Watch the run to its end and return its exit code. ``mask`` is the signal mask from before the fork."""
        reader, writer = socket.socketpair()
        for end in (reader, writer, self._line):
            end.setblocking(False)
        self._selector.register(self._line, selectors.EVENT_READ, self._read)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._on_signals(reader.recv(4096)))
        fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handled_signals = [
            n for n in (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP) if signal.getsignal(n) is not signal.SIG_IGN
        ]
        handlers = {number: signal.signal(number, lambda *_: None) for number in handled_signals}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            code: int | None = None
            while code is None:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._reap()
                code = self._check()
            return code
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for end in (reader, writer, self._line):
                end.close()

    def _check(self) -> int | None:
        """React to the driver's end or to a fault, and limit the time of the teardown.

        Return the run's exit code after killing all processes of the run; None until then.
        """
        if self._driver_status is not None:
            return self._driver_ended(self._driver_status)
        if self._state.exit_code is None:
            return self._check_faults()
        self._teardown_deadline = self._teardown_deadline or Deadline("driver", "teardown", TEARDOWN_S)
        timeout_text = next(self._state.timeouts(), None)
        if self._teardown_deadline.elapsed() > self._teardown_deadline.limit:
            timeout_text = timeout_text or str(self._teardown_deadline.exceeded("the end of the run"))
        if self._driver_deadline is None and timeout_text is not None:
            _say(f"{timeout_text}; all processes of this run are killed")
            process_tree.kill(
                process for process in process_tree.descendants(self._excluded) if process.pid != self._driver
            )
            self._driver_deadline = Deadline("driver", "teardown", ALONE_S)
        if self._driver_deadline is not None and self._driver_deadline.elapsed() > self._driver_deadline.limit:
            return self._kill_all(self._state.exit_code)
        return None

    def _check_faults(self) -> int | None:
        """End the run on an unhandled stop signal, a fault of a Ray process or an expired deadline.

        A stop signal counts as unhandled at once if the driver is in a ``bounded_call`` with ``at_once``. Otherwise, two
        signals count as unhandled ``UNWIND_S`` times the deadline factor after the second. Faults of Ray processes are ignored
        until the driver has reported its run folder. If nothing ends the run, answer a pending question of the driver about
        Ray. Return the exit code of the run; None if the run continues.
        """
        if self._signals and any(call.at_once for call in self._state.calls.values()):
            _say(f"stopped while it waited for {next(iter(self._state.calls.values())).waits_for}")
            return self._kill_all(STOPPED_CODE)
        if self._unwind_deadline is not None and self._unwind_deadline.elapsed() > self._unwind_deadline.limit:
            _say("stopped: the driver did not react; all processes of this run are killed")
            return self._kill_all(STOPPED_CODE)
        if (ray_problems := self._ray.problems()) and self._state.run_dir is not None:
            # Otherwise the driver would write its own crash bundle and blame the next process that dies.
            self._to_driver(signal.SIGSTOP)
            if self._await_related_deaths():
                return self._driver_ended(self._driver_status or 0)
            self._end_driver()
            return self._fail(
                ProcessLost(f"{', '.join(ray_problems)}: Ray cannot continue; the same command resumes the run")
            )
        if (timeout_text := next(self._state.timeouts(), None)) is not None:
            return self._fail(SlimeLikeError(timeout_text))
        self._confirm_ray()
        return None

    def _confirm_ray(self) -> None:
        """Tell the driver that Ray is alive, if the driver has lost an actor and asked.

        The answer is sent ``TOGETHER_S`` after the question: by then, a dead Ray process would have been detected.
        """
        requested_at = self._state.ray_check_requested_at
        if requested_at is not None and time.monotonic() - requested_at > TOGETHER_S:
            self._state.ray_check_requested_at = None
            with suppress(OSError):
                self._line.send(b".")

    def _driver_ended(self, status: int) -> int:
        """Report an abnormal end of the driver, kill all other processes of the run, and return the run's exit code."""
        self._read()
        if self._state.is_done:
            return self._kill_all(status)
        if self._state.exit_code is not None:
            _say(f"the driver {describe_exit(status)} during shutdown")
            return self._kill_all(self._state.exit_code)
        if -status in STOP_SIGNALS:
            _say("stopped")
            return self._kill_all(STOPPED_CODE)
        hint = (
            ": too little memory? (dmesg lists the processes that the kernel killed)"
            if status == -signal.SIGKILL
            else ""
        )
        self._await_related_deaths()  # deaths of Ray processes are detected with a delay
        for key, _ in self._selector.select(0):
            key.data()
        # If the driver is killed, Ray dies with it (PR_SET_PDEATHSIG); if Ray ends the driver, the driver exits or aborts.
        cause = f"{', '.join(self._ray.dead)}: " if self._ray.dead and status != -signal.SIGKILL else ""
        return self._fail(
            ProcessLost(
                f"{cause}the driver (process {self._driver}) {describe_exit(status)}{hint}; the same command resumes the run"
            )
        )

    def _await_related_deaths(self) -> bool:
        """Reap children for ``TOGETHER_S``. Return True if the driver has ended, for example because Ray ended it."""
        end = time.monotonic() + TOGETHER_S
        while time.monotonic() < end:
            self._reap()
            time.sleep(process_tree.WAIT_S)
        return self._driver_status is not None

    def _fail(self, error: SlimeLikeError) -> int:
        """Write the crash bundle if the run folder is known, print the cause, kill all processes of the run and return 1."""
        run_dir = self._state.run_dir
        text = f"{type(error).__name__}: {error}"
        if run_dir is not None:
            try:
                text += f"\ncrash bundle: {write_bundle(run_dir, error, (), self._state.ray_logs)}"
            except Exception as failure:  # noqa: BLE001  the fault boundary of the evidence
                text += f"\ncrash bundle: could not be written ({type(failure).__name__}: {failure})"
        _say(text)
        return self._kill_all(1)

    def _kill_all(self, code: int) -> int:
        """Kill all processes of the run, remove the folders that the driver reported and return ``code``.

        Also write report.html if the driver did not finish.
        """
        deadline = Deadline("supervisor", "teardown", process_tree.END_S)
        self._end_driver(deadline)
        while descendants := process_tree.descendants(self._excluded):
            if deadline.elapsed() > deadline.limit:
                _say(
                    "killed but still present: "
                    + ", ".join(f"process {p.pid} ({process_tree.command(p)})" for p in descendants)
                )
                break
            process_tree.kill(descendants)
            self._reap()
            time.sleep(process_tree.WAIT_S)
        for folder in self._state.folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not self._state.is_done and self._state.run_dir is not None:
            try_report(self._state.run_dir)
        return code

    def _end_driver(self, deadline: Deadline | None = None) -> None:
        """Kill the driver. If a disk or device blocks its exit until ``deadline``, leave it to the kernel.

        By default, this is a ``Deadline`` of ``process_tree.END_S``.
        """
        deadline = deadline or Deadline("supervisor", "teardown", process_tree.END_S)
        self._to_driver(signal.SIGKILL)
        while self._driver_status is None and deadline.elapsed() < deadline.limit:
            self._reap()
            time.sleep(process_tree.WAIT_S)

    def _reap(self) -> None:
        """Reap every ended child of the run, including adopted ones."""
        if not process_tree.has_ended_child():
            return
        for child in process_tree.children() - self._excluded:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid == self._driver:
                    self._driver_status = os.waitstatus_to_exitcode(status)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._signals.append(number)
                if len(self._signals) == 2:
                    self._unwind_deadline = Deadline("driver", "teardown", UNWIND_S)
            if number == signal.SIGTSTP:  # Ctrl-Z
                self._to_driver(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._to_driver(signal.SIGCONT)
            elif number in FORWARDED:
                self._to_driver(number)

    def _to_driver(self, number: int) -> None:
        if self._driver_status is None:  # not reaped, so the process id is still valid
            os.kill(self._driver, number)

    def _read(self) -> None:
        """Apply the messages received from the driver, and watch the Ray processes that they report. Never waits."""
        with suppress(OSError):
            while data := self._line.recv(65_536):
                self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            for name, pid in self._state.update(json.loads(line)).items():
                self._ray.add(name, pid)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(visible(f"{text}\n"))
        sys.stderr.flush()
