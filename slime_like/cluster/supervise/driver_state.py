"""State of a run as the driver reports it to the supervisor. ``driver_link.py`` sends the messages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_like.util.deadline import Deadline


@dataclass(frozen=True, slots=True)
class BoundedCall:
    """A library call by the driver that has no timeout of its own."""

    deadline: Deadline
    waits_for: str
    at_once: bool  # SIGINT, SIGTERM or SIGHUP ends the run immediately during the call


@dataclass(slots=True)
class DriverState:
    """State that the driver has reported; ``update`` applies one message."""

    run_dir: Path | None = None
    folders: list[Path] = field(default_factory=list[Path])  # to remove at the end
    ray_logs: Path | None = None
    calls: dict[int, BoundedCall] = field(default_factory=dict[int, BoundedCall])  # in progress, by number
    exit_code: int | None = None  # set once the teardown has begun
    ray_check_requested_at: float | None = None  # monotonic
    is_done: bool = False

    def update(self, message: Mapping[str, Any]) -> Mapping[str, int]:
        """Apply a message. Return the pids of the Ray processes that it reports, by name.

        The caller must watch these processes from now on. Raises ``AssertionError`` if the kind of the message is
        unknown.
        """
        match message["kind"]:
            case "run_dir":
                self.run_dir = Path(message["run_dir"])
            case "folder":
                self.folders.append(Path(message["folder"]))
            case "ray":
                self.ray_logs = None if message["logs"] is None else Path(message["logs"])
                return message["pids"]
            case "call_begins":
                deadline = Deadline(message["owner"], message["phase"], message["seconds"])
                self.calls[message["number"]] = BoundedCall(deadline, message["waits_for"], message["at_once"])
            case "call_ends":
                self.calls.pop(message["number"], None)
            case "teardown":
                self.exit_code = message["code"]
            case "check_ray":
                self.ray_check_requested_at = time.monotonic()
            case "done":
                self.is_done = True
            case kind:
                raise AssertionError(f"unknown message {kind!r}")
        return {}

    def timeouts(self) -> Iterator[str]:
        """Yield a message for each call that exceeds its deadline."""
        for call in self.calls.values():
            if call.deadline.elapsed() > call.deadline.limit:
                yield str(call.deadline.exceeded(call.waits_for))
