"""Health checks of engines.

A suspended (SIGSTOP) or hung engine keeps its connections open: without these checks, requests to it would wait until their
deadline.
"""

from __future__ import annotations

import asyncio
import time

from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.rollout.pool.engine_pool import DEAD, EnginePool
from slime_like.rollout.pool.engine_slot import EngineSlot
from slime_like.util.deadline import scale


class HealthMonitor:
    """Monitor that checks each engine every ``health.interval_s``.

    An engine's scheduler must respond. While engines are paused (for a push, or because memory is released), they decode
    nothing: then only the server must respond, and no process may be suspended at two consecutive checks. A check that fails
    because a pause began is repeated immediately. An engine that has completed no request since its start is not checked
    until ``health.first_wait_s`` after the start.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._started = False

    def start(self) -> None:
        """Start monitoring in the running event loop. Idempotent."""
        if not self._started:
            self._started = True
            for slot in self._pool.slots:
                self._pool.spawn(self._run(slot))

    def watch(self, slot: EngineSlot) -> None:
        """Monitor an engine that is added to the pool after ``start``."""
        if self._started:
            self._pool.spawn(self._run(slot))

    async def _run(self, slot: EngineSlot) -> None:
        while not slot.is_removed:
            await asyncio.sleep(self._pool.health.interval_s * scale())
            while not slot.is_restarting and not await self._check(slot):
                pass

    async def _check(self, slot: EngineSlot) -> bool:
        """Check one engine. Return False if the check failed and the pool was paused meanwhile, so that it must be repeated."""
        health, engine, pushes = self._pool.health, slot.client, self._pool.num_pushes
        if not slot.has_responded and time.monotonic() - slot.ready_since < health.first_wait_s * scale():
            return True
        decodes = not self._pool.is_pushing
        try:
            healthy = await self._pool.check_health(slot, engine, decodes=decodes)
            stopped_pids = await slot.supervisor.stopped_pids() if healthy and not decodes else ()
        except EngineLost as error:
            if slot.client is engine and not slot.is_restarting:
                self._mark_lost_or_stalled(slot, error)
            return True
        except (EngineError, DeadlineExceeded):
            return True  # the supervisor did not respond; if it is dead, the engine soon ends too
        if slot.client is not engine or slot.is_restarting:
            return True
        if not healthy and decodes and pushes != self._pool.num_pushes:
            return False
        still_stopped, slot.stopped_pids = set(stopped_pids) & set(slot.stopped_pids), stopped_pids
        if healthy and not still_stopped:
            self._pool.mark_responsive(slot)
            return True
        symptom = f"processes {sorted(still_stopped)} are stopped" if still_stopped else "no response to a health check"
        failure = EngineError(f"{engine.name} at {engine.url}: {symptom} (health.timeout_s={health.timeout_s:g})")
        self._mark_lost_or_stalled(slot, failure)
        return True

    def _mark_lost_or_stalled(self, slot: EngineSlot, error: EngineError) -> None:
        try:
            if isinstance(error, EngineLost):
                self._pool.mark_lost(slot, DEAD, error)
            else:
                self._pool.mark_stalled(slot, error)
        except EngineError:
            return  # the run is ending; requests to engines raise the cause
