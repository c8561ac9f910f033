"""Change the number of engines during a run.

consumes  a requested number of engines
produces  engines that join the pool, or leave it
waits for the start of an added engine, bounded by its ``EngineFactory``, and for the stop of a removed one

An added engine serves after the next push, unless the probe of that push finds a disagreement with the trainer. In a run
without pushes, it serves at once. If an engine does not start, the run reports it and continues without it. A removed engine
gets no further requests, and its unfinished groups continue on other engines as after a loss.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

from slime_like.data.share import SINGLE, ManagerShare
from slime_like.errors import ConfigError, DeadlineExceeded, EngineError
from slime_like.rollout.pool.engine_pool import EnginePool, first_line
from slime_like.rollout.pool.engine_slot import EngineSlot, EngineSupervisor
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.util.counted import counted


class EngineFactory(Protocol):
    """Factory that starts and stops engines on any node. The index of an engine is in its name: ``engine 3``."""

    async def create(self, index: int) -> EngineSupervisor:
        """Start an engine; return its supervisor once it responds.

        Raises ``EngineError`` or ``DeadlineExceeded`` if it does not start.
        """
        ...

    async def end(self, index: int) -> None:
        """Stop an engine, even if it is still starting."""
        ...


class PoolResizer:
    """Resizer of a pool: it adds and removes engines."""

    def __init__(
        self,
        pool: EnginePool,
        monitor: HealthMonitor,
        factory: EngineFactory,
        share: ManagerShare = SINGLE,
    ) -> None:
        """``share`` is this pool's share of the run's engines; it maps an index in the pool to the index in the run."""
        self._pool, self._monitor, self._factory, self._share = pool, monitor, factory, share
        self._slots = {share.global_id(i): slot for i, slot in enumerate(pool.slots)}
        self._starts: dict[int, asyncio.Task[None]] = {}

    @property
    def num_engines(self) -> int:
        """Number of engines, including those that are starting."""
        return len(self._slots) + len(self._starts)

    async def resize(self, num_engines: int) -> str:
        """Start or remove engines until there are ``num_engines``; return a description of the change.

        Added engines start in the background. Engines that are still starting are removed first, then those with the highest
        index. Raises ``ConfigError`` if ``num_engines`` is less than 1.
        """
        if num_engines < 1:
            raise ConfigError(f"engines={num_engines}: a run needs at least one engine; to end it, request stop")
        before = self.num_engines
        removed_indices = [*sorted(self._starts, reverse=True), *sorted(self._slots, reverse=True)][
            : before - num_engines
        ]
        if before > num_engines:
            await asyncio.gather(*(self._remove(index) for index in removed_indices))
            names = ", ".join(f"engine {index}" for index in sorted(removed_indices))
            return f"{counted(num_engines, 'engine')}: {names} removed"
        indices = map(self._share.global_id, itertools.count())
        free = (index for index in indices if index not in self._slots and index not in self._starts)
        added_indices = list(itertools.islice(free, num_engines - before))
        for index in added_indices:
            self._starts[index] = asyncio.create_task(self._add(index))
        if not added_indices:
            return f"{counted(num_engines, 'engine')}, as before"
        names = ", ".join(f"engine {index}" for index in added_indices)
        serves = "after a push and its probe" if self._pool.receives_pushes else "once up"
        return f"{counted(num_engines, 'engine')}: {names} started, to serve {serves}"

    async def _add(self, index: int) -> None:
        try:
            supervisor = await self._factory.create(index)
        except (EngineError, DeadlineExceeded) as error:
            await self._factory.end(index)
            self._pool.report(f"engine {index} is not added: {first_line(error)}")
            return
        finally:
            self._starts.pop(index, None)
        slot = self._slots[index] = EngineSlot(supervisor, supervisor.client, is_proven=False)
        self._pool.slots.append(slot)
        self._monitor.watch(slot)
        if self._pool.receives_pushes:
            self._pool.report(f"engine {index} is up; it serves after the next push and its probe")
        else:
            self._admit(slot, -1)
        self._pool.wake()

    def num_unproven(self) -> int:
        """Return the number of added engines that have complete weights and wait for the probe."""
        return sum(slot.loaded_version >= 0 and not slot.is_restarting for slot in self._pool.slots)

    def admit_proven(self, version: int) -> None:
        """Let groups be assigned to added engines that have the weights of ``version``.

        Call it after the probe has compared these engines with the trainer.
        """
        for slot in self._pool.slots:
            if slot.loaded_version == version and not slot.is_restarting:
                self._admit(slot, version)

    def _admit(self, slot: EngineSlot, version: int) -> None:
        slot.is_proven, slot.loaded_version = True, -1
        self._pool.admit(slot, version)
        self._pool.report(f"{slot.client.name} serves")

    async def _remove(self, index: int) -> None:
        if (start := self._starts.pop(index, None)) is not None:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        if (slot := self._slots.pop(index, None)) is not None:
            await self._withdraw(slot)
        await self._factory.end(index)

    async def _withdraw(self, slot: EngineSlot) -> None:
        """Withdraw an engine permanently and cancel its restart, if any. Its requests end; their groups continue elsewhere."""
        self._pool.router.withdraw(slot.client)
        slot.is_removed = slot.is_restarting = True
        self._pool.slots.remove(slot)
        slot.lost_event.set()
        self._pool.wake()
        if slot.restart_task is not None:
            slot.restart_task.cancel()
            await asyncio.gather(slot.restart_task, return_exceptions=True)
        await slot.client.close()

    async def stop(self) -> None:
        """Cancel the starts of engines and wait until they have ended."""
        starts = list(self._starts.values())
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
