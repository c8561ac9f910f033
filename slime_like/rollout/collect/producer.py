"""Generation of rollouts in order, ahead of the trainer by at most the staleness bound.

consumes  requests of the trainer (``get``), which admit further rollouts
produces  one ``GeneratedRollout`` per rollout id, in order
waits for the trainer's requests: rollout j starts once rollout ``j - max_staleness`` has been requested
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from slime_like.errors import SlimeLikeError
from slime_like.rollout.collect.state import GeneratedRollout
from slime_like.util.concurrency import is_task_cancelled


class RolloutProducer:
    """One task that runs ``generate(rollout_id)`` for each admitted rollout.

    Example: with ``max_staleness=1``, requesting rollout 0 admits 0 and 1, so 1 is generated while the trainer trains on 0.
    """

    def __init__(
        self, generate: Callable[[int], Awaitable[GeneratedRollout]], *, first: int, last: int, max_staleness: int
    ) -> None:
        self._generate = generate
        self._next = first
        self._last = last
        self._max_staleness = max_staleness
        self._last_admitted = first - 1
        self._wake = asyncio.Event()
        self._ready: dict[int, asyncio.Future[GeneratedRollout]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def get(self, rollout_id: int) -> GeneratedRollout:
        """Return rollout ``rollout_id`` once it is complete. Raises the error that stopped its generation."""
        if self._failure is not None and rollout_id not in self._ready:
            raise self._failure
        self._last_admitted = max(self._last_admitted, rollout_id + self._max_staleness)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rollout producer")
        return await self._slot(rollout_id)

    async def wait_until_idle(self) -> None:
        """Wait until every admitted rollout is complete or has failed."""
        for rollout_id in range(self._next, min(self._last_admitted + 1, self._last)):
            if self._failure is None:
                await asyncio.wait([self._slot(rollout_id)])

    def completed_rollouts(self) -> list[GeneratedRollout]:
        """Return rollouts that are complete and not consumed, in order. The error of a failed one is raised in its waiter."""
        done = [slot for _, slot in sorted(self._ready.items()) if slot.done() and not slot.cancelled()]
        return [slot.result() for slot in done if slot.exception() is None]

    def restore(self, rollouts: Sequence[GeneratedRollout]) -> None:
        """Add rollouts that an earlier run completed."""
        for generated in rollouts:
            self._slot(generated.rollout_id).set_result(generated)
            self._next, self._last_admitted = generated.rollout_id + 1, generated.rollout_id

    def forget(self, rollout_id: int) -> None:
        """Release a consumed rollout."""
        self._ready.pop(rollout_id, None)

    async def stop(self) -> None:
        """Cancel the rollout in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _slot(self, rollout_id: int) -> asyncio.Future[GeneratedRollout]:
        return self._ready.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    async def _run(self) -> None:
        while self._next < self._last:
            while self._next > self._last_admitted:
                self._wake.clear()
                await self._wake.wait()
            slot = self._slot(self._next)
            try:
                slot.set_result(await self._generate(self._next))
            except asyncio.CancelledError as error:
                if is_task_cancelled():
                    raise
                self._fail(slot, _uncaused_cancel(self._next, error))
                return
            except Exception as error:  # noqa: BLE001  fault boundary of the task: raised in the waiter of this rollout
                self._fail(slot, error)
                return
            self._next += 1

    def _fail(self, slot: asyncio.Future[GeneratedRollout], error: Exception) -> None:
        self._failure = error
        slot.set_exception(error)


def _uncaused_cancel(rollout_id: int, error: asyncio.CancelledError) -> SlimeLikeError:
    failure = SlimeLikeError(
        f"rollout {rollout_id}: rollout.generate raised CancelledError, though nothing cancelled it: it awaited a task or "
        "future that was cancelled; catch the CancelledError in rollout.generate"
    )
    failure.__cause__ = error
    return failure
