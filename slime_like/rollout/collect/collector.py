"""Collect a rollout's groups: take prompts in order and sample them in rounds until enough groups pass the filters.

Because of the rounds, the choice of prompts does not depend on which responses finish first: a resumed run takes the same
prompts. In up to ``rollout.max_refills`` further rounds, dropped groups are replaced by groups of further prompts (dynamic
sampling).
Source: DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.share import SINGLE, ManagerShare
from slime_like.errors import DataError, SlimeLikeError
from slime_like.interfaces import DataSource, Sampling
from slime_like.metrics.types import Metric
from slime_like.rollout.collect.group_filters import GroupFilters
from slime_like.rollout.collect.sampler import GroupRequest, GroupSampler
from slime_like.rollout.collect.state import GeneratedRollout, PartialGroup, QueuedPrompt, RolloutState
from slime_like.types import Prompt, SampleGroup
from slime_like.util.concurrency import is_task_cancelled


class PromptQueue:
    """Queue of prompts: prompts that were given back first, then new ones from the data source."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.queued: tuple[QueuedPrompt, ...] = ()

    def take(self, num_prompts: int) -> list[QueuedPrompt]:
        """Return the next ``num_prompts`` prompts."""
        first, self.queued = self.queued[:num_prompts], self.queued[num_prompts:]
        new_prompts = self.source.next(num_prompts - len(first)) if len(first) < num_prompts else []
        return [*first, *map(QueuedPrompt, new_prompts)]

    def give_back(self, prompts: Sequence[QueuedPrompt]) -> None:
        """Put unused prompts back at the front of the queue: they were taken, but no rollout has used them."""
        self.queued = (*prompts, *self.queued)


class GroupCollector:
    """Collector that samples prompts in rounds. A round ends when all its groups have finished.

    The subclass ``OverSamplingCollector`` starts more groups than needed, and interrupts the rest once enough have passed.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        sampling: Sampling,
        source: DataSource,
        sampler: GroupSampler,
        share: ManagerShare = SINGLE,
    ) -> None:
        """``source`` contains the prompts of ``share``; the sizes in ``cfg`` are totals over all shares."""
        self._cfg, self._sampling, self._sampler, self._share = cfg, sampling, sampler, share
        self._batch_size = share.size(cfg.batch_size)
        self._round_size = share.size(cfg.over_sampling_batch_size or cfg.batch_size)
        self._prompts = PromptQueue(source)
        self._filters = GroupFilters(cfg)
        self._initial_states: dict[int, RolloutState] = {}  # state before each rollout that has not been consumed

    async def generate(self, rollout_id: int) -> GeneratedRollout:
        """Return the groups of one rollout, scored and filtered, ordered by id.

        Raises ``DataError`` if too few groups passed after ``max_refills`` further rounds, for example with a filter
        that hardly any group passes. If ``max_refills`` is 0, too few groups are returned instead.
        """
        self._initial_states[rollout_id] = self.state()
        start = time.time()
        groups, num_generated, num_refills = await self._collect(rollout_id)
        report = self._filters.report()
        return GeneratedRollout(rollout_id, tuple(groups), start, time.time(), num_generated, num_refills, report)

    def metrics(self) -> list[Metric]:
        """Return counts since the last call: groups stopped or restarted while in flight, and discarded tokens.

        The list is empty without over-sampling.
        """
        return []

    def partial_groups(self) -> tuple[PartialGroup, ...]:
        """Return a snapshot of the groups in flight that outlive their rollout; empty without over-sampling."""
        return ()

    def state(self) -> RolloutState:
        """Return the data cursor and the prompts that were taken but are in no rollout."""
        return RolloutState(self._prompts.source.state(), self._prompts.queued, self.partial_groups())

    def state_before(self, rollout_id: int) -> RolloutState:
        """Return the state before a rollout took its prompts; the current state if it has not begun or was forgotten."""
        return self._initial_states.get(rollout_id) or self.state()

    def forget(self, rollout_id: int) -> None:
        """Release the states kept for a consumed rollout and all earlier ones."""
        self._initial_states = {key: value for key, value in self._initial_states.items() if key > rollout_id}

    def restore(self, state: RolloutState) -> None:
        """Continue from ``state``. The data source must already be at the state's cursor."""
        self._prompts.give_back(state.queued)
        # The checkpoint may contain groups that over-sampling had in flight: they start over.
        self._prompts.give_back([QueuedPrompt(partial.prompt) for partial in state.partial_groups])

    async def close(self) -> None:
        """Cancel the groups in flight that outlive their rollout; there are none without over-sampling."""

    async def _collect(self, rollout_id: int) -> tuple[Sequence[SampleGroup], int, int]:
        """Return the groups, the number of groups requested, and the number of rounds after the first.

        Raises ``DataError`` if ``max_refills`` is above 0 and too few groups pass the filters.
        """
        passing_groups: list[SampleGroup] = []
        num_requested, size = 0, self._batch_size
        for num_refills in range(self._cfg.max_refills + 1):
            prompts = self._take(rollout_id, num_requested, size)
            groups = await self._sampler.groups([self._request(group_id, item.prompt) for group_id, item in prompts])
            passing_groups += [group for group in groups if self._filters.keep(group)]
            num_requested += size
            size = self._batch_size - len(passing_groups)
            if size <= 0 or self._cfg.max_refills == 0:
                return passing_groups, num_requested, num_refills
        raise self._too_few(rollout_id, f"{len(passing_groups)} of {num_requested} groups passed rollout.filters")

    def _take(self, rollout_id: int, num_requested: int, num_prompts: int) -> list[tuple[int, QueuedPrompt]]:
        """Take the rollout's next ``num_prompts`` prompts after ``num_requested`` earlier ones; return them with group ids."""
        first = rollout_id * self._round_size * (1 + self._cfg.max_refills) + num_requested
        return [(self._share.global_id(i), item) for i, item in enumerate(self._prompts.take(num_prompts), first)]

    def _request(self, group_id: int, prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, group_id, self._cfg.n_samples_per_prompt, self._sampling)

    def _too_few(self, rollout_id: int, outcome: str) -> DataError:
        batch_size_text = f"rollout.batch_size={self._cfg.batch_size}"
        if self._share.num_shares > 1:
            batch_size_text = f"{self._batch_size}, the share of {self._share.name} in {batch_size_text},"
        return DataError(
            f"rollout {rollout_id}: after rollout.max_refills={self._cfg.max_refills} rounds of further prompts {outcome}, but "
            f"{batch_size_text} groups are needed: raise rollout.max_refills, train on prompts that are "
            "neither too easy nor too hard, or set rollout.max_refills=0 to train on the groups that pass"
        )


class RolloutProducer:
    """One task that runs ``generate(rollout_id)`` for each admitted rollout, in order and ahead of the trainer.

    Rollout j is admitted once rollout ``j - max_staleness``, or a later one, has been requested (``get``).
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
        self._is_stopped = False

    async def get(self, rollout_id: int) -> GeneratedRollout:
        """Return rollout ``rollout_id`` once it is complete.

        Raises the error that ended the generation of this or an earlier rollout, ``SlimeLikeError`` after ``stop``, or
        ``ValueError`` for a rollout that is never generated: one that was forgotten (``forget``), or that the constructor's
        ``first`` and ``last`` exclude.
        """
        if rollout_id not in self._ready:
            if self._failure is not None:
                raise self._failure
            if not self._next <= rollout_id < self._last:
                raise ValueError(
                    f"rollout {rollout_id} is not generated: it was forgotten, or is not between {self._next}, the next "
                    f"rollout, and {self._last - 1}, the last one"
                )
        self._last_admitted = max(self._last_admitted, rollout_id + self._max_staleness)
        self._wake.set()
        if self._task is None and not self._is_stopped:
            self._task = asyncio.create_task(self._run(), name="rollout producer")
        slot = self._slot(rollout_id)
        if self._task is not None:
            await asyncio.wait([slot, self._task], return_when=asyncio.FIRST_COMPLETED)
        if slot.done():
            return slot.result()
        raise self._failure or SlimeLikeError(
            f"rollout {rollout_id} is not generated: the rollout producer was stopped"
        )

    async def wait_until_idle(self) -> None:
        """Wait until every admitted rollout is complete, or until one has failed or ``stop`` is called."""
        if self._task is None:
            return
        for rollout_id in range(self._next, min(self._last_admitted + 1, self._last)):
            if not self._task.done():
                await asyncio.wait([self._slot(rollout_id), self._task], return_when=asyncio.FIRST_COMPLETED)

    def completed_rollouts(self) -> list[GeneratedRollout]:
        """Return the rollouts that are complete and not consumed, in order.

        A failed rollout is left out; ``get`` raises its error.
        """
        return [slot.result() for _, slot in sorted(self._ready.items()) if slot.done()]

    def restore(self, rollouts: Sequence[GeneratedRollout]) -> None:
        """Add rollouts that were completed before the run was resumed. Generation continues after the last of them."""
        for generated in rollouts:
            self._slot(generated.rollout_id).set_result(generated)
            self._next, self._last_admitted = generated.rollout_id + 1, generated.rollout_id

    def forget(self, rollout_id: int) -> None:
        """Release a consumed rollout."""
        self._ready.pop(rollout_id, None)

    async def stop(self) -> None:
        """Cancel the rollout in progress, and wait until its task has ended. No rollout is generated afterwards."""
        self._is_stopped = True
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
                self._failure = _uncaused_cancel(self._next, error)
                return
            except Exception as error:  # noqa: BLE001  fault boundary of the task: the rollout's waiters raise it
                self._failure = error
                return
            self._next += 1


def _uncaused_cancel(rollout_id: int, error: asyncio.CancelledError) -> SlimeLikeError:
    failure = SlimeLikeError(
        f"rollout {rollout_id}: rollout.generate raised CancelledError, though nothing cancelled it: it awaited a task or "
        "future that was cancelled; catch the CancelledError in rollout.generate"
    )
    failure.__cause__ = error
    return failure
