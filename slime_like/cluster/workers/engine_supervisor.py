"""What the rollout manager knows of an engine's actor: ``rollout.fleet.Keeper`` over Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.trainer_worker import EngineAddress
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import EngineError, SlimeLikeError
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.deadline import Deadline

ANSWER_S = 30.0  # for a question to the actor
STOP_S = 30.0  # for an old server to be taken down


class RayEngineSupervisor:
    """One engine through all its restarts."""

    def __init__(self, actor: Any, address: EngineAddress, config: RolloutConfig) -> None:
        self._actor = actor
        self._config = config
        self.address = address
        self.client = self._connect()

    async def restart(self) -> tuple[EngineClient, str]:
        """Another server, in ``rollout.start_deadline_s``."""
        deadline = Deadline("rollout manager", "engine restart", self._config.start_deadline_s + STOP_S)
        self.address, ended = await self._ask("restart", deadline)
        self.client = self._connect()
        return self.client, ended

    async def stopped(self) -> tuple[int, ...]:
        """Stopped processes of the server."""
        return await self._ask("stopped", Deadline("rollout manager", "health", ANSWER_S))

    def _connect(self) -> EngineClient:
        e = self.address
        deadline_s = self._config.request_deadline_s
        return EngineClient(e.url, admin_key=e.admin_key, name=e.name, tp=e.tp, deadline_s=deadline_s)

    async def _ask(self, verb: str, deadline: Deadline) -> Any:
        name = f"the actor of {self.address.name}"
        try:
            async with asyncio.timeout(deadline.remaining(name)):
                return await getattr(self._actor, verb).remote()
        except RayTaskError as error:  # first: where the actor met a deadline of its own, this is a TimeoutError too
            cause = error.cause
            raise (
                type(cause)(str(cause))
                if isinstance(cause, SlimeLikeError)
                else EngineError(f"{name}: {one_line(cause)}")
            ) from error
        except TimeoutError as error:
            raise deadline.exceeded(name) from error
        except RayActorError as error:
            raise EngineError(f"{name} died: {one_line(error)}") from error
