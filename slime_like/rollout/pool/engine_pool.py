"""Pool of a rollout manager's engines: tracks which engines serve, and recovers engines that die or stall.

consumes  failures of requests, results of health checks, commits of weights
produces  engines that accept requests (``EngineRouter``), and a ``Recovery`` for each lost engine
waits for an engine's restart, bounded by its ``EngineSupervisor``, and for the push that gives it weights

At the start of a run every engine serves the weights of its checkpoint. A lost engine is withdrawn immediately: its
unfinished groups continue on other engines, with the same ids and seeds, from the tokens already returned. A restarted engine
has the weights of its checkpoint and joins at the next push or, in a run without pushes, at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from slime_like.config.schema.faults import HealthConfig
from slime_like.data.faults import Recovery
from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_slot import EngineSlot, EngineSupervisor
from slime_like.rollout.pool.event_loop import EventLoopMonitor
from slime_like.rollout.pool.router import EngineAssignment, EngineRouter, copy_error
from slime_like.util.deadline import scale

DEAD, STALLED = "dead", "stalled"


class EnginePool:
    """All engines of a rollout manager. Bound to the event loop that first uses it."""

    def __init__(self, supervisors: Sequence[EngineSupervisor], health: HealthConfig, *, receives_pushes: bool) -> None:
        """``receives_pushes`` is True if engines receive weights by pushes; otherwise they keep their initial weights."""
        self.slots = [EngineSlot(supervisor, supervisor.client) for supervisor in supervisors]
        self.router = EngineRouter([slot.client for slot in self.slots])
        self.recoveries: list[Recovery] = []
        self._reported: dict[int, Recovery] = {}  # last values that take_recoveries returned, by index in recoveries
        self.health = health
        self.receives_pushes = receives_pushes
        self.is_pushing = False  # True while engines are paused: they respond, but do not decode
        self._may_restart = asyncio.Event()  # cleared while the trainer has the memory of the devices
        self._may_restart.set()
        self.num_pushes = 0
        self._messages: list[str] = []
        self._num_restarts = self._num_moved_groups = 0  # counts since the last take_restart_counts
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- use ---------------------------------------------------------------------------------------------------------
    async def call_assigned[T](self, assignment: EngineAssignment, request: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``request`` to the assigned engine; None if the engine was lost or removed.

        If the result is None, clear the engine of ``assignment``, so that the group moves to another engine. If another
        request of the group has done so already, leave ``assignment`` unchanged. Raises the same errors as ``call``.
        """
        engine = assignment.engine
        assert engine is not None
        slot = next(slot for slot in self.slots if slot.client is engine)
        result = await self.call(slot, engine, request)
        if result is not None:
            slot.has_responded = True
        elif assignment.engine is engine:  # otherwise another request of the group has already handled the loss
            assignment.engine = None
            self._count_moved_group(slot)
        return result

    async def call[T](self, slot: EngineSlot, engine: EngineClient, request: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``request`` to ``engine``; None if the engine was lost and is restarted, or was removed.

        Raises the error of the request if the engine is not lost (``_handle_failure``) or must not be restarted, or the
        fatal error if the run is ending.
        """
        try:
            return await _unless_lost(slot.lost_event, engine, request)
        except (EngineError, DeadlineExceeded) as error:
            await self._handle_failure(slot, engine, error)
            return None

    async def check_health(self, slot: EngineSlot, engine: EngineClient, *, decodes: bool = False) -> bool:
        """Return whether ``engine`` passes a health check.

        If this process's event loop was blocked during a failed check, repeat the check, but only until the loop has run for
        ``health.timeout_s`` in total, and only while ``engine`` is still the engine of ``slot`` and is not being restarted.
        Raises ``EngineLost`` if there is no server.
        """
        waited_s, has_warned = 0.0, False
        while True:
            with EventLoopMonitor() as monitor:
                if await engine.health(self.health.timeout_s, decodes=decodes):
                    return True
            waited_s += monitor.ran_s
            was_replaced = slot.client is not engine or slot.is_restarting
            if was_replaced or not monitor.blocked_s or waited_s >= self.health.timeout_s * scale():
                return False
            if not has_warned:
                has_warned = True
                self._messages.append(
                    f"the rollout manager was blocked for {monitor.blocked_s:.1f} s during a health check of {engine.name}, "
                    f"which is repeated: run code that blocks the event loop (for example in rollout.generate) in "
                    f"asyncio.to_thread, unless the machine is just too busy"
                )

    async def abort_all(self) -> None:
        """Abort the requests on every running engine. The requests return the tokens sampled so far."""
        await asyncio.gather(
            *(self.call(slot, slot.client, slot.client.abort_all()) for slot in self.slots if not slot.is_restarting)
        )

    async def _handle_failure(self, slot: EngineSlot, engine: EngineClient, error: Exception) -> None:
        """If the engine of a failed call is lost, restart it in the background.

        An engine is lost if its connection fails, if the call exceeds its deadline, or if it fails a health check
        after another error. Do nothing if the engine is already being restarted, or has been replaced or removed. Raises
        ``error`` if the engine is not lost or must not be restarted, or the fatal error if the run is ending.
        """
        if self._failure is not None:
            raise copy_error(self._failure)
        if slot.client is not engine or slot.is_restarting:
            return
        kind = DEAD if isinstance(error, EngineLost) else STALLED
        if isinstance(error, EngineError) and kind != DEAD:
            try:
                if await self.check_health(slot, engine):
                    raise error
            except EngineLost:
                kind = DEAD
            if slot.client is not engine or slot.is_restarting:
                return
        if isinstance(error, DeadlineExceeded) and self.health.on_stalled_engine == "wait":
            raise error
        self.mark_lost(slot, kind, error)

    def take_restart_counts(self) -> tuple[int, int]:
        """Return (number of restarts, number of groups moved to other engines) since the last call.

        This also resets the counts that ``health.max_restarts`` limits, except those of engines that are restarting.
        """
        counts, self._num_restarts, self._num_moved_groups = (self._num_restarts, self._num_moved_groups), 0, 0
        for slot in self.slots:
            if not slot.is_restarting:
                slot.num_restarts = 0
        return counts

    def take_recoveries(self) -> tuple[Recovery, ...]:
        """Return recoveries that are new or changed since the last call."""
        changed_recoveries = {
            i: recovery for i, recovery in enumerate(self.recoveries) if self._reported.get(i) is not recovery
        }
        self._reported |= changed_recoveries
        return tuple(changed_recoveries.values())

    def report(self, message: str) -> None:
        """Store a message for the user until ``drain_messages`` returns it."""
        self._messages.append(message)

    def drain_messages(self) -> tuple[str, ...]:
        """Return messages for the user since the last call."""
        messages, self._messages = tuple(self._messages), []
        return messages

    # ---- pushes ------------------------------------------------------------------------------------------------------
    def on_push_begin(self) -> None:
        """Increment the number of pauses, and switch to health checks that paused engines can pass.

        Engines pause for a push or for a release of memory.
        """
        self.is_pushing, self.num_pushes = True, self.num_pushes + 1

    def on_push_end(self) -> None:
        """Switch back to health checks that require engines to decode."""
        self.is_pushing = False

    @property
    def has_failed(self) -> bool:
        """True once an error has ended the run. The engines are no longer used."""
        return self._failure is not None

    @property
    def may_restart(self) -> bool:
        """True unless restarts are deferred (``defer_restarts``)."""
        return self._may_restart.is_set()

    def defer_restarts(self) -> None:
        """Do not restart lost engines until ``allow_restarts``, because the trainer holds the device memory that they need."""
        self._may_restart.clear()

    def allow_restarts(self) -> None:
        """Let lost engines restart, including engines lost since ``defer_restarts``."""
        self._may_restart.set()

    async def wait_for_reachable(self) -> list[EngineSlot]:
        """Wait until a push can reach at least one engine; return the slots of all engines that it can reach.

        Raises the error that ended the run.
        """
        while self._failure is None:
            if reachable := [slot for slot in self.slots if not (slot.is_restarting or slot.is_stalled)]:
                return reachable
            await self._changed.wait()
        raise copy_error(self._failure)

    async def wait_until_push_needed(self) -> None:
        """Wait until no engine serves although a push can reach at least one, or until an error ends the run."""
        while self._failure is None and (
            self.router.engines or all(slot.is_restarting or slot.is_stalled for slot in self.slots)
        ):
            await self._changed.wait()

    def admit(self, slot: EngineSlot, version: int) -> None:
        """Let groups be assigned to the engine of ``slot``, which has all weights of ``version``.

        Do nothing if the engine is restarting. If it is not proven (it was added during the run, and no probe has compared
        it with the trainer yet), only record ``version``.
        """
        if slot.is_restarting:
            return
        if not slot.is_proven:
            slot.loaded_version = version
            return
        self.router.admit(slot.client)
        if slot.recovery_index >= 0 and not self.recoveries[slot.recovery_index].joined:
            last = self.recoveries[slot.recovery_index]
            self.recoveries[slot.recovery_index] = replace(last, joined=time.time(), version=version)
        self.wake()

    # ---- loss --------------------------------------------------------------------------------------------------------
    def mark_lost(self, slot: EngineSlot, kind: str, error: Exception) -> None:
        """Withdraw an engine and restart it in the background or, depending on ``health.*``, end the run and raise ``error``."""
        policy = self.health.on_dead_engine if kind == DEAD else self.health.on_stalled_engine
        name = slot.client.name
        if policy != "restart":
            self._fail(error)
            raise error
        self.router.withdraw(slot.client)
        slot.is_restarting, slot.is_stalled, slot.loaded_version = True, False, -1
        slot.lost_event.set()
        slot.recovery_index = len(self.recoveries)
        self.recoveries.append(Recovery(name, f"{kind}: {error}", time.time()))
        joins = "joins at the next push" if self.receives_pushes else "serves once it is up"
        self._messages.append(f"{name} is {kind} and is restarted; it {joins} ({first_line(error)})")
        slot.restart_task = self.spawn(self._restart(slot, error))
        self.wake()

    def mark_stalled(self, slot: EngineSlot, error: Exception) -> None:
        """Withdraw an unresponsive engine until it responds, or treat it as lost, depending on ``health.on_stalled_engine``."""
        if self.health.on_stalled_engine != "wait":
            self.mark_lost(slot, STALLED, error)
        elif not slot.is_stalled:
            slot.is_stalled = True
            self.router.withdraw(slot.client)
            self._messages.append(f"{slot.client.name} does not respond; waiting for it ({first_line(error)})")
            self.wake()

    def mark_responsive(self, slot: EngineSlot) -> None:
        """Record that an engine responds. If it was stalled, it joins at the next push, as its weights are old.

        In a run without pushes, a stalled engine joins at once.
        """
        if slot.is_stalled:
            slot.is_stalled = False
            joins = "joins at the next push" if self.receives_pushes else "serves again"
            self._messages.append(f"{slot.client.name} answers again; it {joins}")
            if not self.receives_pushes:
                self.admit(slot, -1)
            self.wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start ``work`` as a task, which ``stop`` cancels. An exception in the task ends the run."""

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                self._fail(error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(on_end)
        return task

    async def stop(self) -> None:
        """Cancel all tasks and close the connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots:
            await slot.client.close()

    async def _restart(self, slot: EngineSlot, cause: Exception) -> None:
        old_client, name = slot.client, slot.client.name
        while True:
            await self._may_restart.wait()
            slot.num_restarts += 1
            if slot.num_restarts > self.health.max_restarts:
                limit = f"more than health.max_restarts={self.health.max_restarts} times within a rollout"
                self._fail(EngineError(f"{name} was lost {limit}, the last time by: {cause}"))
                return
            try:
                slot.client, exit_summary = await slot.supervisor.restart()
                break
            except (EngineError, DeadlineExceeded) as error:
                cause = error
        await old_client.close()
        self._num_restarts += 1
        last = self.recoveries[slot.recovery_index]
        self.recoveries[slot.recovery_index] = replace(
            last, cause=f"{last.cause}; it {exit_summary}" if exit_summary else last.cause, up=time.time()
        )
        slot.is_restarting, slot.has_responded, slot.stopped_pids, slot.ready_since = False, False, (), time.monotonic()
        slot.lost_event = asyncio.Event()
        if not self.receives_pushes:
            self.admit(slot, -1)
        self.wake()

    def _count_moved_group(self, slot: EngineSlot) -> None:
        """Count a group that moves to another engine because the engine of ``slot`` was lost or removed."""
        self._num_moved_groups += 1
        if slot.recovery_index >= 0 and not slot.is_removed:
            last = self.recoveries[slot.recovery_index]
            self.recoveries[slot.recovery_index] = replace(last, groups=last.groups + 1)

    def _fail(self, error: Exception) -> None:
        """End the run with ``error``, unless an earlier error has already ended it.

        Tasks that wait for an engine or a reply raise the error that ended the run.
        """
        if self._failure is None:
            self._failure = error
            self.router.fail(error)
        for slot in self.slots:
            slot.lost_event.set()
        self.wake()

    def wake(self) -> None:
        """Wake the tasks that wait for the state of an engine to change."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _unless_lost[T](lost_event: asyncio.Event, engine: EngineClient, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the slot's ``lost_event`` is set first, cancel ``work`` and raise ``EngineLost``."""
    task, lost_task = asyncio.ensure_future(work), asyncio.ensure_future(lost_event.wait())
    try:
        await asyncio.wait({task, lost_task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineLost(
            f"the request to {engine.name} at {engine.url} was cancelled, because the pool no longer uses this engine"
        )
    finally:
        for unfinished_task in (task, lost_task):
            unfinished_task.cancel()
        await asyncio.gather(task, lost_task, return_exceptions=True)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
