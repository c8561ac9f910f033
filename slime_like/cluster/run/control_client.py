"""The other side of run control: a process that asks a run for something and waits for the answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slime_like.cluster.run.control import FOLDER, Request
from slime_like.cluster.run.status import SEEN, STATUS, ControlReply, RunStatus, read_status
from slime_like.errors import DataError
from slime_like.util.deadline import Deadline

POLL_S = 0.2


def living(run_dir: Path) -> RunStatus:
    """The status of a run that goes on. Raises ``DataError`` where the folder is no run's, or where its run has ended."""
    status = read_status(run_dir)
    if status is None:
        raise DataError(f"{run_dir} has no {STATUS}: give run.dir of a run that has been started")
    if not status.alive:
        raise DataError(f"{run_dir}: no run is going on here; the last one ended after {status.step} rollouts")
    return status


def ask(run_dir: Path, request: Request) -> float:
    """Ask for ``request``; returns when it was asked for first, in seconds since the epoch, as its answer will say.

    A request that waits to be read already is the same request. Raises ``DataError`` naming what cannot be written.
    """
    path = run_dir / FOLDER / request
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}): ask as the user of the run, or make the folder again"
        ) from error
    try:
        return os.fstat(file).st_mtime  # of this very file, also where the run has removed it by now
    finally:
        os.close(file)


def wait_for_answer(run_dir: Path, request: Request, asked: float, deadline: Deadline) -> ControlReply:
    """What became of a request. Raises ``DataError`` when the run ends without a word, ``DeadlineExceeded``."""
    while True:
        status = read_status(run_dir)
        for answer in () if status is None else status.requests:
            if answer.request == request and answer.asked >= asked and answer.state != SEEN:
                return answer
        if status is None or not status.alive:
            raise DataError(f"{run_dir}: the run ended without an answer to {request}")
        time.sleep(min(POLL_S, deadline.remaining(f"the run in {run_dir}")))
