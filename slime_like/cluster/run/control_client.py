"""Client of run control, which sends a request to a run and waits for the reply."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slime_like.cluster.run.control import FOLDER, Request, RequestText
from slime_like.cluster.run.status import SEEN, STATUS, ControlReply, RunStatus, read_status
from slime_like.errors import DataError
from slime_like.util.counted import counted
from slime_like.util.deadline import Deadline

POLL_S = 0.2


def read_live_status(run_dir: Path) -> RunStatus:
    """Return the status of a live run.

    Raises ``DataError`` if ``run_dir`` has no status file or an invalid one, or if the run has ended.
    """
    status = read_status(run_dir)
    if status is None:
        raise DataError(f"{run_dir} has no {STATUS}: give run.dir of a run that has been started")
    if not status.alive:
        raise DataError(f"{run_dir}: no run is active here; the last one ended after {counted(status.step, 'rollout')}")
    return status


def send_request(run_dir: Path, request: Request | RequestText) -> float:
    """Send ``request``; return its time in seconds since the epoch, which ``wait_for_answer`` needs to find the reply.

    An identical unread request is reused and keeps its time. Raises ``DataError`` if the file of the request cannot be
    written.
    """
    path = run_dir / FOLDER / str(request)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}): send requests as the user of the run, or create the folder again"
        ) from error
    try:
        return os.fstat(file).st_mtime  # time of this file, even if the run has already removed it
    finally:
        os.close(file)


def wait_for_answer(
    run_dir: Path, request: Request | RequestText, requested_at: float, deadline: Deadline
) -> ControlReply:
    """Wait for the reply to a request.

    Raises ``DataError`` if the run ends without a reply or its status file is missing or invalid, and ``DeadlineExceeded``
    if there is no reply in time.
    """
    while True:
        status = read_status(run_dir)
        for answer in () if status is None else status.requests:
            if answer.request == str(request) and answer.requested_at >= requested_at and answer.state != SEEN:
                return answer
        if status is None or not status.alive:
            raise DataError(f"{run_dir}: the run ended without an answer to {request}")
        time.sleep(min(POLL_S, deadline.remaining(f"the run in {run_dir}")))
