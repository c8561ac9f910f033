"""Watchdog thread that polls the ring buffer of this rank's last ops and ends the process if an op takes too long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from slime_like.distributed.forensics.report import report
from slime_like.distributed.forensics.ring import RECORD
from slime_like.distributed.wrapper.errors import memory_or_last
from slime_like.distributed.wrapper.wrapper import Wrapper
from slime_like.printable import visible

EXIT_CODE = 70
LIMIT_FACTOR = 1.1  # the limit is this factor times the deadline, plus GRACE_S: gloo and NCCL should fail first
GRACE_S = 2.0
MEMORY_QUERY_S = 2.0  # limit of the memory query for the report


class Watchdog:
    """Thread that ends the process if an op is in flight for too long.

    Before that, it compares the ring buffers in which the ranks on this node record their ops, and prints the suspicious ops.

    The limit is longer than ``seconds``, the deadline of the process group, so that most hangs end earlier with the group's own
    error. The watchdog covers hangs that the process group does not notice.
    """

    def __init__(self, wrapper: Wrapper, seconds: float, end_process: Callable[[], None] | None = None) -> None:
        self._wrapper = wrapper
        self._limit = seconds * LIMIT_FACTOR + GRACE_S
        self._period = min(10.0, max(0.2, seconds / 10))
        self._stopped = threading.Event()
        self._records = True
        self._end_process = end_process or (lambda: os._exit(EXIT_CODE))
        self._thread = threading.Thread(target=self._watch, name="collectives", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._stopped.wait(self._period):
            self._record_completed()
            issued_ns = oldest_in_flight(self._wrapper)
            if issued_ns is not None and (time.perf_counter_ns() - issued_ns) / 1e9 > self._limit:
                try:
                    _print_error(
                        f"a collective did not end in {self._limit:.0f} s\n{report(self._wrapper.ring.folder)}"
                    )
                    _print_error(memory_or_last(self._wrapper, MEMORY_QUERY_S))
                finally:
                    self._end_process()
                return

    def _record_completed(self) -> None:
        """Record the ends of completed ops that nobody waits for. Do nothing if an earlier call failed, e.g. with a CUDA error.

        After such a failure, these ops still look in flight, so the watchdog ends the process after its limit.
        """
        if not self._records:
            return
        try:
            self._wrapper.record_completed()
        except Exception as error:  # noqa: BLE001 (fault boundary: the thread must keep watching)
            self._records = False
            _print_error(f"ends of collectives are no longer recorded: {type(error).__name__}: {error}")


def _print_error(text: str) -> None:
    sys.stderr.write(visible(f"{text}\n"))
    sys.stderr.flush()


def oldest_in_flight(wrapper: Wrapper) -> int | None:
    """Return the issue time of this rank's oldest op in flight, in ns of ``perf_counter_ns``; None if there is none."""
    ring = wrapper.ring
    width = RECORD.size // 8
    first, stop = ring.first_word(0), ring.first_word(0) + ring.slots * width
    words = ring.words
    issue_times = [words[at + 1] for at in range(first, stop, width) if words[at + 1] and not words[at + 2]]
    return min(issue_times, default=None)
