"""A job of Ray's job API, and the metadata that marks jobs submitted by this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.errors import WorkerError

MARK = "slime_like"
"""Metadata key of every job that this project submits; its value is ``FORMAT``."""
FORMAT = "1"
RUN_NAME, RUN_DIR, USER = "run_name", "run_dir", "user"
CODE, PYTHON, PACKAGE = "code", "python", "package"  # fields of ``NodePaths``
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
STOPPED_CODE = 130


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job as the job server reports it."""

    id: str
    state: str  # PENDING | RUNNING | SUCCEEDED | FAILED | STOPPED
    message: str
    exit_code: int | None  # of the job's command; None before it ends, if Ray stopped it, or if it died with its node
    started_at: float | None  # s since the epoch
    ended_at: float | None
    metadata: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        """True if this project submitted the job."""
        return MARK in self.metadata

    @property
    def has_ended(self) -> bool:
        """True if the job is in a final state."""
        return self.state in ENDED

    @property
    def code(self) -> int:
        """Exit code for a command that waited for the job.

        It is ``exit_code`` if that is known and 0 or more. Otherwise the job's state decides: 0 if the job succeeded, 130
        if it was stopped, else 1.
        """
        if self.exit_code is not None and self.exit_code >= 0:
            return self.exit_code
        return {"SUCCEEDED": 0, "STOPPED": STOPPED_CODE}.get(self.state, 1)

    @property
    def outcome(self) -> str:
        """State to show to users: STOPPED for a run that stopped on request, which Ray reports as FAILED (exit code 130)."""
        return "STOPPED" if self.exit_code == STOPPED_CODE else self.state

    @property
    def reason(self) -> str:
        """First line of the server's message, without the words that announce the log lines below it."""
        return self.message.partition("\n")[0].removesuffix(", last available logs (truncated to 20,000 chars):")


def read_job(entry: Any) -> ClusterJob | None:
    """Return the job described by an entry from the job server; None for a driver that was not submitted as a job.

    Raises ``WorkerError`` if the entry is malformed.
    """
    try:
        if entry["submission_id"] is None:
            return None
        code = entry.get("driver_exit_code")
        return ClusterJob(
            id=str(entry["submission_id"]),
            state=str(entry["status"]),
            message=str(entry.get("message") or ""),
            exit_code=None if code is None else int(code),
            started_at=_seconds(entry.get("start_time")),
            ended_at=_seconds(entry.get("end_time")),
            metadata={str(name): str(value) for name, value in (entry.get("metadata") or {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WorkerError(f"the job server sent a job that cannot be read ({type(error).__name__}: {error})") from error


def _seconds(milliseconds: Any) -> float | None:
    """Return a time of the job server in seconds, or None if it is 0 or missing."""
    return float(milliseconds) / 1000 if milliseconds else None
