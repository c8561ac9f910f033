"""The rollout manager's handle of an engine's actor: implements ``EngineSupervisor`` over Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.calls import call
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.routing import RoutingShape
from slime_like.errors import EngineError, SlimeLikeError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.deadline import Deadline

ANSWER_S = 30.0  # for a call to the actor
STOP_S = 30.0  # to stop the old server


class _ActorLost(EngineError):
    """An engine's actor that Ray does not start again."""


class RayEngineSupervisor:
    """One engine across restarts."""

    def __init__(
        self,
        actor: ActorHandle[EngineActor],
        address: EngineAddress,
        config: RolloutConfig,
        routing: RoutingShape | None,
        start: Callable[[], Awaitable[ActorHandle[EngineActor]]] | None = None,
    ) -> None:
        """``routing`` is the shape of the routed experts that the engine returns; None if it returns none.

        ``start`` starts another actor for the engine, on a live node; None if a lost node cannot be replaced.
        """
        self._start = start
        self._actor = actor
        self._config = config
        self._routing = routing
        self.address = address
        self.client = self._connect()

    async def restart(self) -> tuple[EngineClient, str]:
        """Restart the server within ``rollout.start_deadline_s``; return the new client and how the old server ended.

        If its actor cannot be started again, as after the loss of its node, another one is started on a live node.
        """
        deadline = Deadline("rollout manager", "engine restart", self._config.start_deadline_s + STOP_S)
        try:
            self.address, exit_summary = await self._ask(EngineActor.restart, deadline)
        except _ActorLost:
            if self._start is None:
                raise
            self._actor = await self._start()
            self.address, exit_summary = await self._ask(EngineActor.ready, deadline), "was lost with its node"
        self.client = self._connect()
        return self.client, exit_summary

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return the ids of the server's processes that are stopped, as by SIGSTOP."""
        return await self._ask(EngineActor.stopped_pids, Deadline("rollout manager", "health", ANSWER_S))

    def _connect(self) -> EngineClient:
        e = self.address
        return EngineClient(
            e.url,
            admin_key=e.admin_key,
            name=e.name,
            tp=e.tp,
            deadline_s=self._config.request_deadline_s,
            routing=self._routing,
        )

    async def _ask[R](self, method: Callable[[EngineActor], R], deadline: Deadline) -> R:
        name = f"the actor of {self.address.name}"
        try:
            async with asyncio.timeout(deadline.remaining(name)):
                return await call(self._actor, method)
        except RayTaskError as error:  # first: if the actor exceeded its own deadline, this is also a TimeoutError
            cause = error.cause
            raise (
                type(cause)(str(cause))
                if isinstance(cause, SlimeLikeError)
                else EngineError(f"{name}: {one_line(cause)}")
            ) from error
        except TimeoutError as error:
            raise deadline.exceeded(name) from error
        except (RayActorError, ActorUnschedulableError) as error:
            raise _ActorLost(f"{name} died: {one_line(error)}") from error
