"""Pool of a run's engines: which of them serve, and recovery of engines that die or stall during the run.

consumes  failures of requests, results of health checks, commits of weights
produces  engines that accept requests (``EngineRouter``), and a ``Recovery`` for each lost engine
waits for an engine's restart, bounded by its ``EngineSupervisor``, and for the push that gives it weights

An engine serves after its first push. A lost engine is withdrawn immediately: its unfinished groups continue on other
engines, with the same ids and seeds, from the tokens already returned. A restarted engine has the weights of its
checkpoint and joins at the next push.
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
from slime_like.rollout.pool.router import EngineRouter, Lease, Work, copy_error
from slime_like.util.deadline import scale

DEAD, STALLED = "dead", "stalled"


class EngineSupervisor(Protocol):
    """Owner of one engine's processes, on any node."""

    @property
    def client(self) -> EngineClient:
        """Client of the current engine process."""
        ...

    async def restart(self) -> tuple[EngineClient, str]:
        """Kill the old processes and start new ones. Return the client once it responds, and how the old engine ended.

        Raises ``EngineError`` or ``DeadlineExceeded`` if the engine does not start.
        """
        ...

    async def stopped(self) -> tuple[int, ...]:
        """Return ids of the engine's stopped processes (SIGSTOP)."""
        ...


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of the run, across all its restarts."""

    supervisor: EngineSupervisor
    client: EngineClient
    since: float = field(default_factory=time.monotonic)  # ready to answer
    down: bool = False  # being restarted
    stalled: bool = False  # withdrawn until it responds again
    answered: bool = False  # at least one request since its start
    stopped: tuple[int, ...] = ()  # stopped processes at the last check
    restarts: int = 0  # within this rollout
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set when the engine is lost: requests to it end
    recovery: int = -1  # index of the newest one in EnginePool.recoveries


class EnginePool:
    """All engines of a run. Bound to the event loop that first uses it."""

    def __init__(self, supervisors: Sequence[EngineSupervisor], health: HealthConfig, *, pushed: bool) -> None:
        """``pushed``: weights arrive by pushes; otherwise an engine serves the weights it started with."""
        self.slots = [EngineSlot(supervisor, supervisor.client) for supervisor in supervisors]
        self.router = EngineRouter([slot.client for slot in self.slots], self.ask)
        self.recoveries: list[Recovery] = []
        self._reported: dict[int, Recovery] = {}  # index -> value last returned
        self.health = health
        self._pushed = pushed
        self._news: list[str] = []
        self._num_restarts = self._num_groups = 0  # since take_restart_counts
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- use ---------------------------------------------------------------------------------------------------------
    async def ask[T](self, lease: Lease, work: Work[T]) -> T | None:
        """Run ``work`` on the leased engine; None if that engine was lost: the lease is then to be settled again."""
        engine = lease.engine
        assert engine is not None
        slot = self._slot_of(engine)
        try:
            result = await unless_lost(slot.lost, engine, work(engine))
        except (EngineError, DeadlineExceeded) as error:
            await self.failed(slot, engine, error)
            if lease.engine is engine:  # else another request of the group was first
                lease.engine = None
                self._note_group(slot)
            return None
        slot.answered = True
        return result

    async def check_health(self, slot: EngineSlot, engine: EngineClient, *, decodes: bool = False) -> bool:
        """Return whether ``engine`` passes a health check.

        A check during which this process's event loop was blocked is repeated, until the engine had ``health.timeout_s``
        in total. Raises ``EngineLost`` if there is no server.
        """
        waited_s, warned = 0.0, False
        while True:
            with EventLoopMonitor() as monitor:
                if await engine.health(self.health.timeout_s, decodes=decodes):
                    return True
            waited_s += monitor.ran_s
            replaced = slot.client is not engine or slot.down
            if replaced or not monitor.blocked_s or waited_s >= self.health.timeout_s * scale():
                return False
            if not warned:
                warned = True
                self._news.append(
                    f"the rollout manager was held up for {monitor.blocked_s:.1f} s of a health check of {engine.name}, which is made "
                    "again: what blocks its event loop (in a generate function, say) belongs in asyncio.to_thread, or the "
                    "machine is too busy"
                )

    async def abort_all(self) -> None:
        """Abort the requests on every running engine; each keeps its sampled tokens."""

        async def abort(slot: EngineSlot, engine: EngineClient) -> None:
            try:
                await unless_lost(slot.lost, engine, engine.abort_all())
            except (EngineError, DeadlineExceeded) as error:
                await self.failed(slot, engine, error)

        await asyncio.gather(*(abort(slot, slot.client) for slot in self.slots if not slot.down))

    async def failed(self, slot: EngineSlot, engine: EngineClient, error: Exception) -> None:
        """Handle a failed engine call. Returns if the engine was lost and is being restarted; re-raises ``error`` if the engine
        is alive, or raises the fatal error if the run is ending.
        """
        if self._failure is not None:
            raise copy_error(self._failure)
        if slot.client is not engine or slot.down:
            return
        kind = DEAD if isinstance(error, EngineLost) else STALLED
        if isinstance(error, EngineError) and kind != DEAD:
            try:
                if await self.check_health(slot, engine):
                    raise error
            except EngineLost:
                kind = DEAD
            if slot.client is not engine or slot.down:
                return
        if isinstance(error, DeadlineExceeded) and self.health.on_stalled_engine == "wait":
            raise error
        self.lose(slot, kind, error)

    def take_restart_counts(self) -> tuple[int, int]:
        """Return (restarts, groups moved to other engines) since the last call, and reset the restart limit of each engine."""
        counts, self._num_restarts, self._num_groups = (self._num_restarts, self._num_groups), 0, 0
        for slot in self.slots:
            if not slot.down:
                slot.restarts = 0
        return counts

    def take_recoveries(self) -> tuple[Recovery, ...]:
        """Return recoveries that are new or changed since the last call."""
        changed = {i: recovery for i, recovery in enumerate(self.recoveries) if self._reported.get(i) is not recovery}
        self._reported |= changed
        return tuple(changed.values())

    def news(self) -> tuple[str, ...]:
        """Return messages for the user since the last call."""
        messages, self._news = tuple(self._news), []
        return messages

    # ---- pushes ------------------------------------------------------------------------------------------------------
    async def joinable(self) -> list[EngineSlot]:
        """Return the engines that a push can reach, once there is one. Raises the error that ends the run."""
        while self._failure is None:
            if reachable := [slot for slot in self.slots if not (slot.down or slot.stalled)]:
                return reachable
            await self._changed.wait()
        raise copy_error(self._failure)

    async def starved(self) -> None:
        """Wait until no engine serves and one waits for weights, or until the run ends."""
        while self._failure is None and (self.router.engines or all(slot.down or slot.stalled for slot in self.slots)):
            await self._changed.wait()

    def joined(self, slot: EngineSlot, version: int) -> None:
        """Record that ``slot`` has all weights of ``version``, and let it serve."""
        if slot.down:
            return
        self.router.admit(slot.client)
        if slot.recovery >= 0 and not self.recoveries[slot.recovery].joined:
            last = self.recoveries[slot.recovery]
            self.recoveries[slot.recovery] = replace(last, joined=time.time(), version=version)
        self._wake()

    # ---- loss --------------------------------------------------------------------------------------------------------
    def lose(self, slot: EngineSlot, kind: str, error: Exception) -> None:
        """Withdraw an engine and restart it, or end the run, depending on ``health.*``."""
        policy = self.health.on_dead_engine if kind == DEAD else self.health.on_stalled_engine
        name = slot.client.name
        if policy != "restart":
            self._fail(error)
            raise error
        self.router.withdraw(slot.client)
        slot.down, slot.stalled = True, False
        slot.lost.set()
        slot.recovery = len(self.recoveries)
        self.recoveries.append(Recovery(name, f"{kind}: {error}", time.time()))
        self._news.append(f"{name} is {kind} and is restarted; it joins at the next push ({_line(error)})")
        self.spawn(self._restart(slot, error))
        self._wake()

    def stall(self, slot: EngineSlot, error: Exception) -> None:
        """Wait for an unresponsive engine, or treat it as lost, depending on ``health.on_stalled_engine``."""
        if self.health.on_stalled_engine != "wait":
            self.lose(slot, STALLED, error)
        elif not slot.stalled:
            slot.stalled = True
            self.router.withdraw(slot.client)
            self._news.append(f"{slot.client.name} does not answer and is waited for ({_line(error)})")
            self._wake()

    def revive(self, slot: EngineSlot) -> None:
        """Accept a stalled engine that responds again; its weights are old, so it joins at the next push."""
        if slot.stalled:
            slot.stalled = False
            self._news.append(f"{slot.client.name} answers again; it joins at the next push")
            if not self._pushed:
                self.joined(slot, -1)
            self._wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the pool stops. Its exception ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                self._fail(error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def stop(self) -> None:
        """Cancel all tasks and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots:
            await slot.client.close()

    async def _restart(self, slot: EngineSlot, cause: Exception) -> None:
        old, name = slot.client, slot.client.name
        while True:
            slot.restarts += 1
            if slot.restarts > self.health.max_restarts:
                limit = f"health.max_restarts={self.health.max_restarts} within a rollout"
                self._fail(EngineError(f"{name} was lost once more than {limit}, the last time by: {cause}"))
                return
            try:
                slot.client, ended = await slot.supervisor.restart()
                break
            except (EngineError, DeadlineExceeded) as error:
                cause = error
        await old.close()
        self._num_restarts += 1
        last = self.recoveries[slot.recovery]
        self.recoveries[slot.recovery] = replace(
            last, cause=f"{last.cause}; it {ended}" if ended else last.cause, up=time.time()
        )
        slot.down, slot.answered, slot.stopped, slot.since = False, False, (), time.monotonic()
        slot.lost = asyncio.Event()
        if not self._pushed:
            self.joined(slot, -1)
        self._wake()

    def _note_group(self, slot: EngineSlot) -> None:
        """Count a group whose engine was lost."""
        self._num_groups += 1
        if slot.recovery >= 0:
            last = self.recoveries[slot.recovery]
            self.recoveries[slot.recovery] = replace(last, groups=last.groups + 1)

    def _fail(self, error: Exception) -> None:
        """End the run with ``error``, unless an earlier error did: raised to all waiters for an engine or its answer."""
        if self._failure is None:
            self._failure = error
            self.router.fail(error)
        for slot in self.slots:
            slot.lost.set()
        self._wake()

    def _slot_of(self, engine: EngineClient) -> EngineSlot:
        return next(slot for slot in self.slots if slot.client is engine)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def unless_lost[T](lost_event: asyncio.Event, engine: EngineClient, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises ``EngineLost`` as soon as ``lost`` (``EngineSlot.lost``) is set."""
    task, lost_task = asyncio.ensure_future(work), asyncio.ensure_future(lost_event.wait())
    try:
        await asyncio.wait({task, lost_task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineLost(f"{engine.name} at {engine.url} was given up")
    finally:
        for pending in (task, lost_task):
            pending.cancel()
        await asyncio.gather(task, lost_task, return_exceptions=True)


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]
