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
        """Kill the old processes and start new ones; return the client of the new engine once it responds.

        Also return a line on how the old engine ended, empty if that is unknown. Raises ``EngineError`` or
        ``DeadlineExceeded`` if the engine does not start.
        """
        ...

    async def stop_server(self) -> None:
        """Kill the processes, whatever their state; ``restart`` starts new ones.

        If the engine's actor is lost, they end with it. Raises ``EngineError`` if the actor fails, ``DeadlineExceeded`` if it
        does not respond.
        """
        ...

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return the pids of the engine's suspended processes (SIGSTOP).

        Raises ``EngineError`` if the engine's actor is lost or fails, ``DeadlineExceeded`` if it does not respond.
        """
        ...


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of the run, across all its restarts."""

    supervisor: EngineSupervisor
    client: EngineClient
    # Monotonic time at which the current process became ready.
    ready_since: float = field(default_factory=time.monotonic)
    is_restarting: bool = False
    is_stalled: bool = False  # withdrawn until it responds again
    has_responded: bool = False  # True after the first completed request since its start
    stopped_pids: tuple[int, ...] = ()  # processes that were suspended (SIGSTOP) at the last check
    num_restarts: int = 0  # within this rollout
    lost_event: asyncio.Event = field(default_factory=asyncio.Event)  # set when the engine is lost: requests to it end
    is_removed: bool = False  # from the pool
    is_proven: bool = True  # False: added during the run, and no probe has compared it with the trainer yet
    loaded_version: int = -1  # weight version of an engine that is not proven; -1: it has none, or it is proven
    restart_task: asyncio.Task[None] | None = None
    recovery_index: int = -1  # index of its newest recovery in EnginePool.recoveries; -1: none
