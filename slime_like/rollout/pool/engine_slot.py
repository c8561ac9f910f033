"""Slot of one engine in a run; it outlives the engine's processes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from slime_like.rollout.engine.client import EngineClient


class EngineSupervisor(Protocol):
    """Owner of one engine's processes, on any node."""

    @property
    def client(self) -> EngineClient:
        """Client of the current engine process."""
        ...

    async def restart(self) -> tuple[EngineClient, str]:
        """Kill the old processes and start new ones. Return the client once it responds, and how the old engine ended.

        Raises ``EngineError`` or ``DeadlineExceeded`` if the engine does not start.
        """
        ...

    async def stopped(self) -> tuple[int, ...]:
        """Return ids of the engine's stopped processes (SIGSTOP)."""
        ...


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of the run, across all its restarts."""

    supervisor: EngineSupervisor
    client: EngineClient
    since: float = field(default_factory=time.monotonic)  # time at which it became ready to respond
    down: bool = False  # being restarted
    stalled: bool = False  # withdrawn until it responds again
    answered: bool = False  # True after the first completed request since its start
    stopped: tuple[int, ...] = ()  # stopped processes at the last check
    restarts: int = 0  # within this rollout
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set when the engine is lost: requests to it end
    recovery: int = -1  # index of the newest one in EnginePool.recoveries
