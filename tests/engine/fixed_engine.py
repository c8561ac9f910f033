"""Supervisor of an engine that another component started."""

from __future__ import annotations

from slime_like.errors import EngineError
from slime_like.rollout.engine.client import EngineClient


class FixedEngine:
    """``EngineSupervisor`` that cannot restart its engine."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def restart(self) -> tuple[EngineClient, str]:
        raise EngineError(f"{self.client.name} was started by another component and cannot be restarted")

    async def stop_server(self) -> None:
        raise EngineError(f"{self.client.name} was started by another component and cannot be stopped")

    async def stopped_pids(self) -> tuple[int, ...]:
        return ()
