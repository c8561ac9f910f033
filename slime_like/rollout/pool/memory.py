"""Release the device memory of a pool's engines while the trainer needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slime_like.config.schema.residency import COLLECT, ENGINE_PARTS, ENGINE_PHASES, ENGINE_WEIGHTS
from slime_like.errors import DeadlineExceeded, EngineError
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.engine_slot import EngineSlot

type MemoryAction = Callable[[EngineClient], Coroutine[Any, Any, None]]


class PoolMemory:
    """Controller of the engines' device memory between pushes. Engines are paused while a part of their memory is released."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def enter(self, phase: str) -> None:
        """Release the parts that ``phase`` does not need; in phase collect, restore all parts and resume decoding.

        A push restores the parts that it needs; an engine whose weights were released stays paused until then, even in phase
        collect. An engine that was lost earlier restarts before the release, because its start needs memory. An engine that
        is lost during the release is stopped, because a hung engine would keep its memory; it restarts in the next push or in
        phase collect, as does an engine that is lost afterwards. If an error has ended the run, a phase other than collect stops
        all engines, so that they hold no device memory while the last checkpoint may still be written.
        """
        if phase == COLLECT:
            self._pool.allow_restarts()
            await self._on_each(self._restore)
            self._pool.on_push_end()
            return
        if self._pool.has_failed:
            self._pool.defer_restarts()
            try:
                await self._stop(self._pool.slots)
            except DeadlineExceeded as error:  # the save is worth an attempt without this engine's memory
                self._pool.report(f"{error}: it may keep device memory while the last checkpoint is written")
            return
        await self._wait_for_restarts()
        unneeded_parts = tuple(part for part in ENGINE_PARTS if part not in ENGINE_PHASES[phase])
        self._pool.on_push_begin()  # paused engines decode nothing for a health check
        self._pool.defer_restarts()

        async def release(engine: EngineClient) -> None:
            await engine.pause()
            await engine.release_memory(unneeded_parts)

        await self._on_each(release)
        await self._stop([slot for slot in self._pool.slots if slot.is_restarting])

    async def _wait_for_restarts(self) -> None:
        """Wait until no engine is starting. Deferred restarts are not awaited: they would wait for this phase to end."""
        while self._pool.may_restart:
            restarts = [slot.restart_task for slot in self._pool.slots if slot.is_restarting and slot.restart_task]
            if not (running := [task for task in restarts if not task.done()]):
                return
            await asyncio.wait(running)

    async def _stop(self, slots: Sequence[EngineSlot]) -> None:
        """Kill the engines' processes, because they may still hold device memory. Report an engine whose actor fails.

        Raises ``DeadlineExceeded`` if an engine's actor does not respond, after the others have been killed.
        """

        async def stop(slot: EngineSlot) -> None:
            try:
                await slot.supervisor.stop_server()
            except EngineError as error:
                self._pool.report(f"{slot.client.name} may keep device memory, because it was not stopped: {error}")

        results = await asyncio.gather(*(stop(slot) for slot in slots), return_exceptions=True)
        errors = [result for result in results if result is not None]
        if other_errors := [error for error in errors if not isinstance(error, DeadlineExceeded)]:
            raise other_errors[0]
        if errors:
            raise DeadlineExceeded("; ".join(map(str, errors)))

    async def _restore(self, engine: EngineClient) -> None:
        """Restore an engine's released memory and resume decoding. If weights were released, leave this to the next push."""
        if engine.released and ENGINE_WEIGHTS not in engine.released:
            await engine.restore_memory(ENGINE_PARTS)
            await engine.resume()

    async def _on_each(self, action: MemoryAction) -> None:
        async def run(slot: EngineSlot, engine: EngineClient) -> None:
            async def act() -> bool:
                await action(engine)
                return True

            await self._pool.call(slot, engine, act())

        slots = [slot for slot in self._pool.slots if not (slot.is_restarting or slot.is_stalled)]
        await asyncio.gather(*(run(slot, slot.client) for slot in slots))
