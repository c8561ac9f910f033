"""The rollout manager's handle of an engine's actor: implements ``EngineSupervisor`` over Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.calls import call
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_starter import EngineStarter
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.routing import RoutingShape
from slime_like.errors import EngineError, EngineNodeLost, SlimeLikeError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.deadline import Deadline

ANSWER_S = 30.0  # for a call to the actor
STOP_S = 30.0  # to stop the old server, or to start the process of an actor


class _ActorLost(EngineError):
    """An engine's actor has died, and Ray does not restart it."""


class RayEngineFactory:
    """Starter of engines during a run: implements ``EngineFactory`` over Ray."""

    def __init__(
        self, starter: EngineStarter, config: RolloutConfig, routing: RoutingShape | None, peer_timeout_s: float
    ) -> None:
        """Store the arguments. ``routing`` and ``peer_timeout_s`` are passed on to each ``EngineClient``."""
        self._starter, self._config, self._routing, self._peer_timeout_s = starter, config, routing, peer_timeout_s

    async def create(self, index: int) -> RayEngineSupervisor:
        """Start an engine on live nodes; return its supervisor once it responds.

        Raises ``EngineError`` or ``DeadlineExceeded`` if it does not start.
        """
        actor = await self._starter.start(index)  # waits for GPUs until its own deadline
        deadline = Deadline("rollout manager", "engine start", self._config.start_deadline_s + STOP_S)
        address = await ask(actor, f"the actor of engine {index}", EngineActor.ready, deadline)
        return self.supervisor(index, actor, address)

    def supervisor(self, index: int, actor: ActorHandle[EngineActor], address: EngineAddress) -> RayEngineSupervisor:
        """Return a supervisor for the engine of ``actor``, which responds at ``address``."""
        start = partial(self._starter.start, index)
        return RayEngineSupervisor(actor, address, self._config, self._connect, start)

    def _connect(self, address: EngineAddress) -> EngineClient:
        """Return a client of the engine that responds at ``address``."""
        return EngineClient.at(
            address,
            num_dp_ranks=self._config.dp_attention,
            deadline_s=self._config.request_deadline_s,
            peer_timeout_s=self._peer_timeout_s,
            routing=self._routing,
        )

    async def end(self, index: int) -> None:
        """Stop an engine, even if it is still starting."""
        await self._starter.end(index)


class RayEngineSupervisor:
    """Supervisor of one engine across restarts."""

    def __init__(
        self,
        actor: ActorHandle[EngineActor],
        address: EngineAddress,
        config: RolloutConfig,
        connect: Callable[[EngineAddress], EngineClient],
        start: Callable[[], Awaitable[ActorHandle[EngineActor]]] | None = None,
    ) -> None:
        """Connect to the engine at ``address`` with ``connect``, which returns a client.

        ``start`` starts another actor for the engine on live nodes; None if a lost node cannot be replaced.
        """
        self._start = start
        self._actor = actor
        self._config = config
        self._connect = connect
        self.address = address
        self.client = connect(address)

    async def restart(self) -> tuple[EngineClient, str]:
        """Restart the servers on all nodes; return the new client and a line on how the old engine ended.

        If Ray cannot start the actor again, for example after the loss of its node, or if another node of the engine is
        lost, start another actor on live nodes. Raises ``EngineError`` or ``DeadlineExceeded`` if the engine does not
        start.
        """
        deadline = Deadline("rollout manager", "engine restart", self._config.start_deadline_s + STOP_S)
        try:
            self.address, exit_summary = await self._ask(EngineActor.restart, deadline)
        except (_ActorLost, EngineNodeLost) as error:
            if self._start is None:
                raise
            self._actor = await self._start()  # waits for GPUs until its own deadline
            deadline = Deadline("rollout manager", "engine start", self._config.start_deadline_s + STOP_S)
            self.address = await self._ask(EngineActor.ready, deadline)
            exit_summary = _describe_loss(error)
        self.client = self._connect(self.address)
        return self.client, exit_summary

    async def stop_server(self) -> None:
        """Stop the engine's servers on all nodes; ``restart`` starts new ones.

        Raises the errors of ``ask``, except if the actor died.
        """
        with contextlib.suppress(_ActorLost):  # its servers have ended with it
            await self._ask(EngineActor.stop_server, Deadline("rollout manager", "engine stop", STOP_S))

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return the pids of the engine's suspended processes (SIGSTOP) on all nodes. Raises the errors of ``ask``."""
        return await self._ask(EngineActor.stopped_pids, Deadline("rollout manager", "health", ANSWER_S))

    async def _ask[R](self, method: Callable[[EngineActor], R], deadline: Deadline) -> R:
        return await ask(self._actor, f"the actor of {self.address.name}", method, deadline)


def _describe_loss(error: EngineError) -> str:
    """Return on one line how an engine ended whose actor or another node was lost."""
    text, cause = str(error).splitlines()[0], error.__cause__
    if not isinstance(error, _ActorLost):
        return f"ended; {text}"
    is_lost_node = isinstance(cause, ActorUnschedulableError) or "its node has died" in str(cause)
    return "was lost with its node" if is_lost_node else f"was lost: {text}"


async def ask[R](
    actor: ActorHandle[EngineActor], name: str, method: Callable[[EngineActor], R], deadline: Deadline
) -> R:
    """Return the result of a call to an engine's actor.

    Raises the call's own ``SlimeLikeError``, ``EngineError`` if the actor died or the call raised another error, or
    ``DeadlineExceeded`` if there is no answer in time.
    """
    try:
        async with asyncio.timeout(deadline.remaining(name)):
            return await call(actor, method)
    except RayTaskError as error:  # first: if the actor exceeded its own deadline, this is also a TimeoutError
        cause = error.cause
        raise (
            type(cause)(str(cause)) if isinstance(cause, SlimeLikeError) else EngineError(f"{name}: {one_line(cause)}")
        ) from error
    except TimeoutError as error:
        raise deadline.exceeded(name) from error
    except (RayActorError, ActorUnschedulableError) as error:
        raise _ActorLost(f"{name} died: {one_line(error)}") from error
