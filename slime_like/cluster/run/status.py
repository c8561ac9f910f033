"""``run.dir/status.json``: which process a run is, how far it has come, what was asked of it and what became of that."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slime_like.cluster.supervise.stacks import start_time
from slime_like.util.reading import Count, InputFile

STATUS = "status.json"
MOST_REQUESTS = 20  # that are kept: the newest

SEEN, DONE, FAILED, DROPPED, UNKNOWN = "seen", "done", "failed", "dropped", "unknown"


@dataclass(frozen=True, slots=True)
class ControlReply:
    """What became of one request."""

    request: str
    asked: float  # s since the epoch: when the file was written, or the signal came
    state: str  # seen | done | failed | dropped | unknown
    step: int  # rollouts trained on when it was seen
    detail: str = ""
    by: str = ""  # who asked, where it is not the run's own user


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its folder tells it to other processes."""

    step: Count  # rollouts trained on
    num_steps: Count
    running: bool = True
    time: float = field(default_factory=time.time)  # of this entry, s since the epoch
    host: str = field(default_factory=socket.gethostname)
    pid: Count = field(default_factory=os.getpid)
    started: str = field(
        default_factory=lambda: start_time(os.getpid())
    )  # tells the process from a later one of its id
    requests: tuple[ControlReply, ...] = ()  # oldest first

    @property
    def here(self) -> bool:
        """Whether the run is one of this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether the run goes on, as far as this machine can know: of another machine's run what it said last."""
        return self.running and (not self.here or start_time(self.pid) == self.started)

    def with_answer(self, answer: ControlReply) -> RunStatus:
        """The status with one more answer, which takes the place of an earlier one to the same request."""
        others = [old for old in self.requests if (old.request, old.asked) != (answer.request, answer.asked)]
        return replace(self, requests=(*others, answer)[-MOST_REQUESTS:])


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Replace the file by a whole one. Raises ``OSError`` where the disk refuses."""
    path = run_dir / STATUS
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(replace(status, time=time.time())), indent=1) + "\n")
    partial.replace(path)


def read_status(run_dir: Path) -> RunStatus | None:
    """The newest status; None where no run has written one. Raises ``DataError`` where the file is none."""
    path = run_dir / STATUS
    if not os.path.lexists(path):
        return None
    file = InputFile(path, fix="remove it, a run writes it again")
    return file.typed(file.json(), RunStatus)
