"""An engine started by another component, which cannot be restarted."""

from __future__ import annotations

from slime_like.errors import EngineError
from slime_like.rollout.engine.client import EngineClient


class Kept:
    """``EngineSupervisor`` of such an engine."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def restart(self) -> tuple[EngineClient, str]:
        raise EngineError(f"{self.client.name} is not started again")

    async def stopped(self) -> tuple[int, ...]:
        return ()
