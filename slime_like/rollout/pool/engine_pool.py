"""The engines of a run: which serve, and what becomes of one that dies or stalls while the run goes on.

consumes  failures of requests, answers to health checks, commits of weights
produces  engines that may be asked (``EngineRouter``), and a ``Recovery`` for each that was lost
waits for an engine's restart, which its ``EngineSupervisor`` bounds, and for the push that gives it weights

An engine serves from the push that it took part in. A lost one is withdrawn at once: its unfinished groups go on
elsewhere, with the same ids and seeds, from the answers that they had. What is restarted has the weights of its
checkpoint, and joins at the next push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slime_like.config.schema.faults import HealthConfig
from slime_like.data.faults import Recovery
from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.event_loop import EventLoopMonitor
from slime_like.rollout.pool.router import EngineRouter, Lease, Work, again
from slime_like.util.deadline import scale

DEAD, STALLED = "dead", "stalled"


class EngineSupervisor(Protocol):
    """The owner of one engine's processes, wherever they run."""

    @property
    def client(self) -> EngineClient:
        """The engine as it is now."""
        ...

    async def restart(self) -> tuple[EngineClient, str]:
        """Kill what is left, start anew; the client once it answers, and how the old one ended.

        Raises ``EngineError`` or ``DeadlineExceeded`` where it does not start.
        """
        ...

    async def stopped(self) -> tuple[int, ...]:
        """Processes of the engine that are stopped, as by SIGSTOP."""
        ...


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of the run, through all its restarts."""

    keeper: EngineSupervisor
    client: EngineClient
    since: float = field(default_factory=time.monotonic)  # it answers
    down: bool = False  # being restarted
    stalled: bool = False  # and waited for
    answered: bool = False  # a group, since its start
    stopped: tuple[int, ...] = ()  # its processes, when last looked at
    restarts: int = 0  # within this rollout
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # nobody waits for its answers any more
    recovery: int = -1  # index of the newest


class EnginePool:
    """The engines' seats. Belongs to the event loop that first uses it."""

    def __init__(self, keepers: Sequence[EngineSupervisor], health: HealthConfig, *, pushed: bool) -> None:
        """``pushed``: weights come by pushes; else an engine serves what it started with."""
        self.seats = [EngineSlot(keeper, keeper.client) for keeper in keepers]
        self.router = EngineRouter([seat.client for seat in self.seats], self.ask)
        self.recoveries: list[Recovery] = []
        self._told: dict[int, Recovery] = {}  # index -> as it was then
        self.health = health
        self._pushed = pushed
        self._news: list[str] = []
        self._num_restarts = self._num_groups = 0  # since they were last taken
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- use ---------------------------------------------------------------------------------------------------------
    async def ask[T](self, lease: Lease, work: Work[T]) -> T | None:
        """``router.Ask``: where the engine is lost, its group is without one, and goes on elsewhere when it is settled."""
        engine = lease.engine
        assert engine is not None
        seat = self._seat(engine)
        try:
            found = await unless_lost(seat.lost, engine, work(engine))
        except (EngineError, DeadlineExceeded) as error:
            await self.failed(seat, engine, error)
            if lease.engine is engine:  # else another request of the group noticed first
                lease.engine = None
                self._note_group(seat)
            return None
        seat.answered = True
        return found

    async def answers(self, seat: EngineSlot, engine: EngineClient, *, decodes: bool = False) -> bool:
        """A health check. One in which this process was held up and read nothing for a while is made again, until the engine
        had ``health.timeout_s`` in all.

        Raises ``EngineLost`` where there is no server.
        """
        had_s, told = 0.0, False
        while True:
            with EventLoopMonitor() as pulse:
                if await engine.health(self.health.timeout_s, decodes=decodes):
                    return True
            had_s += pulse.ran_s
            gone = seat.client is not engine or seat.down
            if gone or not pulse.held_s or had_s >= self.health.timeout_s * scale():
                return False
            if not told:
                told = True
                self._news.append(
                    f"the rollout manager was held up for {pulse.held_s:.1f} s of a health check of {engine.name}, which is made "
                    "again: what blocks its event loop (in a generate function, say) belongs in asyncio.to_thread, or the "
                    "machine is too busy"
                )

    async def abort_all(self) -> None:
        """Every engine that may hold requests ends them with the tokens they have; one that is lost holds none."""

        async def abort(seat: EngineSlot, engine: EngineClient) -> None:
            try:
                await unless_lost(seat.lost, engine, engine.abort_all())
            except (EngineError, DeadlineExceeded) as error:
                await self.failed(seat, engine, error)

        await asyncio.gather(*(abort(seat, seat.client) for seat in self.seats if not seat.down))

    async def failed(self, seat: EngineSlot, engine: EngineClient, error: Exception) -> None:
        """Return where ``error`` is the end of that engine, which is then on its way back; raise where it is not, or where
        the run ends: what ends it.
        """
        if self._failure is not None:
            raise again(self._failure)
        if seat.client is not engine or seat.down:
            return
        kind = DEAD if isinstance(error, EngineLost) else STALLED
        if isinstance(error, EngineError) and kind != DEAD:
            try:
                if await self.answers(seat, engine):
                    raise error
            except EngineLost:
                kind = DEAD
            if seat.client is not engine or seat.down:
                return
        if isinstance(error, DeadlineExceeded) and self.health.on_stalled_engine == "wait":
            raise error
        self.lose(seat, kind, error)

    def rollout_made(self) -> tuple[int, int]:
        """Restarts, and groups that went on elsewhere, since the last call; engines may fail anew."""
        found, self._num_restarts, self._num_groups = (self._num_restarts, self._num_groups), 0, 0
        for seat in self.seats:
            if not seat.down:
                seat.restarts = 0
        return found

    def take_recoveries(self) -> tuple[Recovery, ...]:
        """Those that are not as they were when they were last taken, if they were."""
        taken = {i: lost for i, lost in enumerate(self.recoveries) if self._told.get(i) is not lost}
        self._told |= taken
        return tuple(taken.values())

    def news(self) -> tuple[str, ...]:
        """What a user should be told since the last call."""
        found, self._news = tuple(self._news), []
        return found

    # ---- pushes ------------------------------------------------------------------------------------------------------
    async def joinable(self) -> list[EngineSlot]:
        """The engines that a push can reach, once there is one. Raises what ends the run."""
        while self._failure is None:
            if found := [seat for seat in self.seats if not (seat.down or seat.stalled)]:
                return found
            await self._changed.wait()
        raise again(self._failure)

    async def starved(self) -> None:
        """Wait until no engine serves and one waits for weights, or until none ever will."""
        while self._failure is None and (self.router.engines or all(seat.down or seat.stalled for seat in self.seats)):
            await self._changed.wait()

    def joined(self, seat: EngineSlot, version: int) -> None:
        """``seat`` holds all weights of ``version``."""
        if seat.down:
            return
        self.router.admit(seat.client)
        if seat.recovery >= 0 and not self.recoveries[seat.recovery].joined:
            last = self.recoveries[seat.recovery]
            self.recoveries[seat.recovery] = replace(last, joined=time.time(), version=version)
        self._wake()

    # ---- loss --------------------------------------------------------------------------------------------------------
    def lose(self, seat: EngineSlot, kind: str, why: Exception) -> None:
        """Withdraw an engine and restart it, or end the run, as ``health.*`` says."""
        policy = self.health.on_dead_engine if kind == DEAD else self.health.on_stalled_engine
        name = seat.client.name
        if policy != "restart":
            self._fail(why)
            raise why
        self.router.withdraw(seat.client)
        seat.down, seat.stalled = True, False
        seat.lost.set()
        seat.recovery = len(self.recoveries)
        self.recoveries.append(Recovery(name, f"{kind}: {why}", time.time()))
        self._news.append(f"{name} is {kind} and is restarted; it joins at the next push ({_line(why)})")
        self.spawn(self._restart(seat, why))
        self._wake()

    def stall(self, seat: EngineSlot, why: Exception) -> None:
        """Wait for an engine that does not answer, or do as with a dead one, as ``health.on_stalled_engine`` says."""
        if self.health.on_stalled_engine != "wait":
            self.lose(seat, STALLED, why)
        elif not seat.stalled:
            seat.stalled = True
            self.router.withdraw(seat.client)
            self._news.append(f"{seat.client.name} does not answer and is waited for ({_line(why)})")
            self._wake()

    def revive(self, seat: EngineSlot) -> None:
        """An engine that was waited for answers again: with the weights it had, so that the next push comes first."""
        if seat.stalled:
            seat.stalled = False
            self._news.append(f"{seat.client.name} answers again; it joins at the next push")
            if not self._pushed:
                self.joined(seat, -1)
            self._wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Keep a task until it ends or the fleet stops. What it raises ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                self._fail(error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def stop(self) -> None:
        """End what goes on, and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for seat in self.seats:
            await seat.client.close()

    async def _restart(self, seat: EngineSlot, why: Exception) -> None:
        old, name = seat.client, seat.client.name
        while True:
            seat.restarts += 1
            if seat.restarts > self.health.max_restarts:
                limit = f"health.max_restarts={self.health.max_restarts} within a rollout"
                self._fail(EngineError(f"{name} was lost once more than {limit}, the last time by: {why}"))
                return
            try:
                seat.client, ended = await seat.keeper.restart()
                break
            except (EngineError, DeadlineExceeded) as error:
                why = error
        await old.close()
        self._num_restarts += 1
        last = self.recoveries[seat.recovery]
        self.recoveries[seat.recovery] = replace(
            last, cause=f"{last.cause}; it {ended}" if ended else last.cause, up=time.time()
        )
        seat.down, seat.answered, seat.stopped, seat.since = False, False, (), time.monotonic()
        seat.lost = asyncio.Event()
        if not self._pushed:
            self.joined(seat, -1)
        self._wake()

    def _note_group(self, seat: EngineSlot) -> None:
        """A group was at work on an engine that is lost."""
        self._num_groups += 1
        if seat.recovery >= 0:
            last = self.recoveries[seat.recovery]
            self.recoveries[seat.recovery] = replace(last, groups=last.groups + 1)

    def _fail(self, error: Exception) -> None:
        """The run ends by the first such error: whoever waits for an engine, or for its answer, gets it."""
        if self._failure is None:
            self._failure = error
            self.router.fail(error)
        for seat in self.seats:
            seat.lost.set()
        self._wake()

    def _seat(self, engine: EngineClient) -> EngineSlot:
        return next(seat for seat in self.seats if seat.client is engine)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def unless_lost[T](lost: asyncio.Event, engine: EngineClient, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` answers. Raises ``EngineLost`` as soon as ``lost`` (``EngineSlot.lost``) is set."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineLost(f"{engine.name} at {engine.url} was given up")
    finally:
        for waited in (task, gone):
            waited.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]
