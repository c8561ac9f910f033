"""``run.dir/status.json``: process, progress, and requests with their results."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slime_like.checkpoint.files import replacing
from slime_like.cluster.supervise.stacks import start_time
from slime_like.util.reading import Count, InputFile

STATUS = "status.json"
MAX_REQUESTS = 20  # newest requests in the file

SEEN, DONE, FAILED, DROPPED, UNKNOWN = "seen", "done", "failed", "dropped", "unknown"


@dataclass(frozen=True, slots=True)
class ControlReply:
    """Status of one request."""

    request: str
    requested_at: float  # s since the epoch: time of the file or signal
    state: str  # seen | done | failed | dropped | unknown
    step: int  # trained rollouts when the request was read
    detail: str = ""
    by: str = ""  # requesting user, if not the run's user


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run, shared with other processes through a file."""

    step: Count  # trained rollouts
    num_steps: Count
    running: bool = True
    time: float = field(default_factory=time.time)  # last update, s since the epoch
    host: str = field(default_factory=socket.gethostname)
    pid: Count = field(default_factory=os.getpid)
    # Distinguishes the process from a later one with the same id.
    started: str = field(default_factory=lambda: start_time(os.getpid()))
    requests: tuple[ControlReply, ...] = ()  # oldest first

    @property
    def here(self) -> bool:
        """True if the run is on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """True if the run is alive. For a run on another machine, this is the last state that it reported."""
        return self.running and (not self.here or start_time(self.pid) == self.started)

    def with_answer(self, answer: ControlReply) -> RunStatus:
        """Return the status with ``answer`` as the newest, replacing an earlier answer to the same request.

        Only the newest ``MAX_REQUESTS`` answers are kept.
        """
        other_answers = [
            reply
            for reply in self.requests
            if (reply.request, reply.requested_at) != (answer.request, answer.requested_at)
        ]
        return replace(self, requests=(*other_answers, answer)[-MAX_REQUESTS:])


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Write ``status``, with the current time, to ``run_dir/status.json`` atomically.

    Raises ``OSError`` if the file cannot be written.
    """
    with replacing(run_dir / STATUS) as scratch:
        scratch.write_text(json.dumps(asdict(replace(status, time=time.time())), indent=1) + "\n")


def read_status(run_dir: Path) -> RunStatus | None:
    """Return the newest status; None if there is no file. Raises ``DataError`` if the file is invalid."""
    path = run_dir / STATUS
    if not os.path.lexists(path):
        return None
    file = InputFile(path, fix="remove it, a run writes it again")
    return file.typed(file.json(), RunStatus)
