"""Looks after engines that serve: one that is stopped or hangs breaks no connection, and no request would tell."""

from __future__ import annotations

import asyncio
import time

from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.rollout.pool.engine_pool import DEAD, EnginePool, EngineSlot
from slime_like.util.deadline import scale


class HealthMonitor:
    """A health check of every engine each ``health.interval_s``.

    Between pushes the engine's scheduler must answer. A paused one decodes nothing: during a push the server must answer, and
    none of its processes may be stopped at two checks in a row. A check that a push cut short is made again at once.
    """

    def __init__(self, fleet: EnginePool) -> None:
        self._fleet = fleet
        self._pushes = 0
        self._pushing = False
        self._started = False

    def start(self) -> None:
        """Begin, in the running event loop; again and again is once."""
        if not self._started:
            self._started = True
            for seat in self._fleet.seats:
                self._fleet.spawn(self._run(seat))

    def push_begins(self) -> None:
        """Engines are being paused."""
        self._pushing, self._pushes = True, self._pushes + 1

    def push_ends(self) -> None:
        """Engines decode again."""
        self._pushing = False

    async def _run(self, seat: EngineSlot) -> None:
        while True:
            await asyncio.sleep(self._fleet.health.interval_s * scale())
            while not seat.down and not await self._look(seat):
                pass

    async def _look(self, seat: EngineSlot) -> bool:
        """One check of one engine; False where its silence says nothing, as it was paused meanwhile."""
        health, engine, pushes = self._fleet.health, seat.client, self._pushes
        if not seat.answered and time.monotonic() - seat.since < health.first_wait_s * scale():
            return True
        decodes = not self._pushing
        try:
            answers = await self._fleet.answers(seat, engine, decodes=decodes)
            stopped = await seat.keeper.stopped() if answers and not decodes else ()
        except EngineLost as error:
            if seat.client is engine and not seat.down:
                self._lose(seat, error)
            return True
        except (EngineError, DeadlineExceeded):
            return True  # its owner cannot tell; if that is gone, the engine soon is
        if seat.client is not engine or seat.down:
            return True
        if not answers and decodes and pushes != self._pushes:
            return False
        again, seat.stopped = set(stopped) & set(seat.stopped), stopped
        if answers and not again:
            self._fleet.revive(seat)
            return True
        what = f"processes {sorted(again)} are stopped" if again else "no answer to a health check"
        why = EngineError(f"{engine.name} at {engine.url}: {what} (health.timeout_s={health.timeout_s:g})")
        self._lose(seat, why)
        return True

    def _lose(self, seat: EngineSlot, why: EngineError) -> None:
        try:
            if isinstance(why, EngineLost):
                self._fleet.lose(seat, DEAD, why)
            else:
                self._fleet.stall(seat, why)
        except EngineError:
            return  # the run is told to stop; whoever asks an engine gets the reason
