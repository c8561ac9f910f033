"""Weight update of a pool's engines: the part of a push that runs in the rollout manager.

Engines that are lost during the update are excluded from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_like.config.schema.residency import ENGINE_PARTS, ENGINE_PHASES, PUSH
from slime_like.errors import EngineLost, WeightSyncError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.engine_slot import EngineSlot
from slime_like.util.concurrency import gather_or_cancel
from slime_like.util.deadline import scale

ABORT_S = 5.0


@dataclass(frozen=True, slots=True)
class UpdateTarget:
    """An engine that takes part in an update, and its slot. A restarted engine may replace the engine in the slot."""

    slot: EngineSlot
    engine: EngineClient

    @property
    def is_current(self) -> bool:
        """Return True if the slot still has this engine and is not restarting it."""
        return self.slot.client is self.engine and not self.slot.is_restarting


class EngineWeightUpdate:
    """Update of all reachable engines, including restarted ones; at most one update is open at a time."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._targets: list[UpdateTarget] = []
        self._is_open = False  # True while an update is neither resumed nor aborted

    async def begin(self) -> tuple[EngineAddress, ...]:
        """Pause each reachable engine, restore the memory that a push needs, and open the engine's update.

        Return the addresses of these engines. An update that is still open is discarded. Deferred restarts may begin; if no
        engine is reachable, this method waits until one is. When a push starts over, an engine may be unresponsive because
        it still waits for an engine that was lost in the first attempt. Such an engine counts as stalled after
        ``health.timeout_s``, unless ``health.on_stalled_engine`` is wait. Raises the error that ended the run, or an error
        of an engine that is not lost.
        """
        seconds = (
            self._pool.health.timeout_s if self._is_open and self._pool.health.on_stalled_engine != "wait" else None
        )
        self._is_open = True
        self._pool.on_push_begin()
        self._pool.allow_restarts()
        self._targets = []
        while not self._targets:
            targets = [UpdateTarget(slot, slot.client) for slot in await self._pool.wait_for_reachable()]
            self._targets = await self._on_each(targets, partial(_open, seconds=seconds))
        return tuple(target.engine.address for target in self._targets)

    async def commit(self, version: int) -> None:
        """Close the update on each engine, restore its memory and flush its KV cache. Engines lost meanwhile are excluded.

        Raises ``EngineError`` if an engine did not receive all parameters, ``WeightSyncError`` if one reports another version,
        or the errors of ``begin``.
        """

        async def close(engine: EngineClient) -> None:
            await engine.end_update(version)
            served_version = await engine.version()
            if served_version != version:
                raise WeightSyncError(
                    f"{engine.name} reports version {served_version} after the commit of version {version}"
                )
            await engine.restore_memory(ENGINE_PARTS)
            await engine.flush()

        self._targets = await self._on_each([target for target in self._targets if target.is_current], close)

    async def resume(self, version: int) -> None:
        """Resume decoding under ``version``, and let groups be assigned to the updated engines.

        An engine that was added during the run gets no groups until ``PoolResizer.admit_proven`` is called. Engines with
        older weights are withdrawn. Raises ``EngineLost`` if no updated engine remains, or the errors of ``begin``.
        """
        resume_results = await self._on_each(self._targets, EngineClient.resume)
        for target in resume_results:
            self._pool.admit(target.slot, version)
        current = {target.engine for target in resume_results}
        for engine in self._pool.router.engines:
            if engine not in current:  # the engine stalled and has old weights
                self._pool.router.withdraw(engine)
        self._pool.on_push_end()
        self._is_open = False
        if not resume_results:
            raise EngineLost(f"no remaining engine has the weights of version {version}")

    async def abort(self) -> None:
        """End a push that failed and is not repeated: restore the memory of all responding engines and resume some of them.

        Engines whose update is committed or was not begun are resumed. The others are withdrawn and stay paused until a push
        is committed, because their weights are incomplete or have no version number; requests that they already have wait
        until then, or until their deadline.
        """
        self._pool.on_push_end()
        self._is_open = False
        for slot in self._pool.slots:
            if slot.client.is_updating:
                self._pool.router.withdraw(slot.client)
        self._pool.wake()  # ``wait_until_push_needed``
        for undo in (_restore_all, _resume_unless_updating):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S * scale()):
                    calls = (undo(slot.client) for slot in self._pool.slots if not slot.is_restarting)
                    await asyncio.gather(*calls, return_exceptions=True)

    async def _on_each(
        self, targets: Sequence[UpdateTarget], action: Callable[[EngineClient], Coroutine[Any, Any, None]]
    ) -> list[UpdateTarget]:
        """Run ``action`` on each engine; return the targets whose engines were not lost.

        Raises the first error other than the loss of an engine; the other calls are cancelled, so that none of them changes
        an engine during ``abort``.
        """

        async def run(engine: EngineClient) -> bool:
            await action(engine)
            return True

        calls = [self._pool.call(target.slot, target.engine, run(target.engine)) for target in targets]
        results = await gather_or_cancel(calls)
        # A target may have been lost and restarted while the other calls were in progress.
        return [target for target, ok in zip(targets, results, strict=True) if ok and target.is_current]


async def _open(engine: EngineClient, seconds: float | None) -> None:
    await engine.pause(seconds)
    await engine.restore_memory(ENGINE_PHASES[PUSH])
    await engine.begin_update()


async def _restore_all(engine: EngineClient) -> None:
    await engine.restore_memory(ENGINE_PARTS)


async def _resume_unless_updating(engine: EngineClient) -> None:
    if not engine.is_updating:
        await engine.resume()
