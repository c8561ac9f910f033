"""New weights for the engines of a fleet: opened, committed, and what becomes of an engine that is lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_like.errors import DeadlineExceeded, EngineError, EngineLost, WeightSyncError
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool, EngineSlot, unless_lost
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.util.deadline import scale

ABORT_S = 5.0


@dataclass(frozen=True, slots=True)
class PushTarget:
    """An engine that takes part in a push, and its seat, which another may have taken meanwhile."""

    seat: EngineSlot
    engine: EngineClient

    @property
    def there(self) -> bool:
        """Whether it is still this engine that sits there."""
        return self.seat.client is self.engine and not self.seat.down


class Push:
    """One weight update at a time, over the engines that can be reached: those that serve, and those that came back."""

    def __init__(self, fleet: EnginePool, watch: HealthMonitor) -> None:
        self._fleet = fleet
        self._watch = watch
        self._taking: list[PushTarget] = []
        self._begun = False  # and neither resumed nor given up

    async def begin(self) -> tuple[str, ...]:
        """Pause and open an update on each; the names of those that take part. An update left open is given up.

        Waits for a restart where no engine is left. When a push begins again, an engine that still waits for one which the
        first beginning lost does not answer: it is stalled after ``health.timeout_s``.
        """
        seconds = (
            self._fleet.health.timeout_s if self._begun and self._fleet.health.on_stalled_engine != "wait" else None
        )
        self._begun = True
        self._watch.push_begins()
        self._taking = []
        while not self._taking:
            there = [PushTarget(seat, seat.client) for seat in await self._fleet.joinable()]
            self._taking = await self._each(there, partial(_open, seconds=seconds))
        return tuple(member.engine.name for member in self._taking)

    async def commit(self, version: int) -> None:
        """Close the update: fails unless each parameter of each engine was written. KV of old weights is flushed.

        Raises ``EngineLost`` where no engine is left to serve ``version``.
        """

        async def close(engine: EngineClient) -> None:
            await engine.end_update(version)
            served = await engine.version()
            if served != version:
                raise WeightSyncError(
                    f"{engine.name} says it serves version {served} after the commit of version {version}"
                )
            await engine.flush()

        self._taking = await self._each([member for member in self._taking if member.there], close)

    async def resume(self, version: int) -> None:
        """Let the engines decode under ``version``. Raises ``EngineLost`` where none is left."""
        taking = await self._each(self._taking, EngineClient.resume)
        for member in taking:
            self._fleet.joined(member.seat, version)
        current = {member.engine for member in taking}
        for engine in self._fleet.router.engines:
            if engine not in current:  # it stalled, and has old weights
                self._fleet.router.withdraw(engine)
        self._watch.push_ends()
        self._begun = False
        if not taking:
            raise EngineLost(f"no engine is left that took the weights of version {version}")

    async def abort(self) -> None:
        """After a push that failed for good: let go of the engines' locks, as far as they answer."""
        self._watch.push_ends()
        self._begun = False
        for undo in (EngineClient.abort_update, EngineClient.resume):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S * scale()):
                    undone = (undo(seat.client) for seat in self._fleet.seats if not seat.down)
                    await asyncio.gather(*undone, return_exceptions=True)

    async def _each(
        self, members: Sequence[PushTarget], verb: Callable[[EngineClient], Coroutine[Any, Any, None]]
    ) -> list[PushTarget]:
        """``verb`` on each engine; those that are still there. Raises what is not the loss of an engine."""

        async def on(member: PushTarget) -> bool:
            try:
                await unless_lost(member.seat.lost, member.engine, verb(member.engine))
            except (EngineError, DeadlineExceeded) as error:
                await self._fleet.failed(member.seat, member.engine, error)
                return False
            return True

        done = await asyncio.gather(*(on(member) for member in members))
        # One may have been lost, and another started in its place, while the rest were waited for.
        return [member for member, well in zip(members, done, strict=True) if well and member.there]


async def _open(engine: EngineClient, seconds: float | None) -> None:
    await engine.pause(seconds)
    await engine.begin_update()
