"""Over-sampling: begin more groups than a rollout needs, take the first that pass the filters, stop the others.

A stopped group is continued in the next rollout under its weights (partial rollouts), or given up: its prompt then comes
before all others, and after ``MAX_GIVEN_UP`` times the rollout waits for it. Either way every prompt is answered for
exactly one rollout: it is taken, dropped by a filter, in flight, or back in the queue, and in no two of these.

Sources: over-sampling and partial rollouts as slime has them (slime/rollout/sglang_rollout.py); the staleness bound of
continued groups as in AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1. A rollout waits for a group at the bound
instead of giving it up: long answers are the ones that become stale, and a run that never trained on them would learn
to be brief.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slime_like.errors import DataError
from slime_like.metrics.types import Metric, Sum
from slime_like.rollout.collect.partial import PartialCompletions, Unfinished
from slime_like.rollout.collect.prompt_queue import PromptQueue, QueuedPrompt
from slime_like.rollout.collect.refill import CollectedGroups, RefillPolicy
from slime_like.types import Prompt, SampleGroup

MAX_GIVEN_UP = 3


@dataclass(slots=True, eq=False)
class GroupTask:
    """One group in flight."""

    group_id: int
    prompt: Prompt
    given_up: int = 0  # rollouts that have begun an answer to this prompt and given it up
    journal: PartialCompletions = field(default_factory=PartialCompletions)
    generated: bool = False  # True once only the reward is missing
    task: asyncio.Task[SampleGroup] | None = None
    group: SampleGroup | None = None  # scored, and passed the filters

    def on_generated(self) -> None:
        """Mark the group as generated: only its reward is missing."""
        self.generated = True
        self.journal.close()

    @property
    def running(self) -> asyncio.Task[SampleGroup]:
        """Return the task of the group, which must have begun."""
        assert self.task is not None, f"group {self.group_id} was not begun"
        return self.task


@dataclass(frozen=True, slots=True)
class Partial:
    """Policy for stopped groups."""

    enabled: bool  # stopped groups are continued in the next rollout
    max_staleness: (
        float  # versions that a group may lag behind the trainer when it is trained on; inf: no weights are pushed
    )


@dataclass(frozen=True, slots=True)
class OverSamplingCallbacks:
    """Callbacks of ``OverSampling``."""

    answer: Callable[[GroupTask], Awaitable[SampleGroup]]  # run a group to its end
    keep: Callable[[SampleGroup], bool]  # ask the filters
    go: Callable[[], None]  # let requests be sent
    stop: Callable[[], Awaitable[None]]  # end all requests and send no more; journals keep the sampled tokens


class OverSampling:
    """Groups in flight, across rollouts."""

    def __init__(
        self, policy: RefillPolicy, partial: Partial, prompts: PromptQueue, callbacks: OverSamplingCallbacks
    ) -> None:
        self._policy, self._partial, self._prompts, self._callbacks = policy, partial, prompts, callbacks
        self._works: list[GroupTask] = []
        self._finished: list[GroupTask] = []  # in order of completion; consumed by ``_sift``
        self._given_up: set[asyncio.Task[SampleGroup]] = set()
        self._counts: Counter[str] = Counter()

    async def make(self, rollout_id: int) -> CollectedGroups:
        """Return the first ``batch_size`` groups that pass, ordered by id, including groups at their staleness bound.

        Raises ``DataError`` if too few groups passed after ``max_refills`` rounds, and any error of a group's task.
        """
        try:
            return await self._make(rollout_id)
        except BaseException:
            await self.close()
            raise

    async def _make(self, rollout_id: int) -> CollectedGroups:
        self._restart_stale(rollout_id)
        self._callbacks.go()
        round_size = self._policy.round_size or self._policy.batch_size
        for work in self._works:  # restored from an earlier process
            if work.task is None:
                self._begin(work)
        num_requested = self._ask(rollout_id, 0, round_size - len(self._works))
        refills = 0
        while True:
            self._sift()
            passed = [work for work in self._works if work.group is not None]
            coming = [work for work in self._works if work.group is None]
            if len(passed) >= self._policy.batch_size and not self._awaits_due(passed, coming, rollout_id):
                break
            if len(passed) + len(coming) < self._policy.batch_size and refills < self._policy.max_refills:
                num_requested += self._ask(rollout_id, num_requested, round_size)
                refills += 1
            elif len(passed) + len(coming) < self._policy.batch_size and self._policy.max_refills:
                raise self._short(rollout_id, num_requested, len(passed))
            elif coming:
                await asyncio.wait([work.running for work in coming], return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        selected = self._take(rollout_id)
        await self._callbacks.stop()
        self._settle()
        groups = sorted((work.group for work in selected if work.group is not None), key=lambda group: group.group_id)
        return CollectedGroups(tuple(groups), num_requested, refills)

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return a snapshot of the groups in flight."""
        return tuple(Unfinished(work.group_id, work.prompt, work.journal.copy()) for work in self._works)

    def restore(self, unfinished: Iterable[Unfinished]) -> None:
        """Continue the groups that an earlier process had in flight, or queue their prompts if partial rollouts are off."""
        if self._partial.enabled:
            self._works = [
                GroupTask(item.group_id, item.prompt, journal=PartialCompletions(item.calls)) for item in unfinished
            ]
        else:
            self._prompts.give_back([QueuedPrompt(item.prompt) for item in unfinished])

    def metrics(self) -> list[Metric]:
        """Return the metrics since the last call."""
        names = ("stopped_groups", "restarted_groups", "wasted_tokens")
        metrics: list[Metric] = [Sum(f"rollout/{name}", self._counts[name]) for name in names]
        self._counts.clear()
        return metrics

    async def close(self) -> None:
        """Cancel all tasks."""
        tasks = [*(work.task for work in self._works if work.task is not None), *self._given_up]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _ask(self, rollout_id: int, num_requested: int, count: int) -> int:
        """Begin groups of ``count`` further prompts, after ``num_requested`` of this rollout. Return how many began."""
        first = rollout_id * self._policy.max_groups + num_requested
        queued = enumerate(self._prompts.take(max(0, count)), first)
        works = [GroupTask(group_id, item.prompt, item.given_up) for group_id, item in queued]
        self._works += works
        for work in works:
            self._begin(work)
        return len(works)

    def _begin(self, work: GroupTask) -> None:
        work.task = asyncio.ensure_future(self._callbacks.answer(work))
        work.task.add_done_callback(lambda _: self._finished.append(work))

    def _sift(self) -> None:
        """Apply the filters to finished groups. Raises the error of a failed group."""
        finished, self._finished = self._finished, []
        for work in finished:
            if work not in self._works:
                continue
            self._works.remove(work)
            group = work.running.result()
            if self._callbacks.keep(group):
                work.group = group
                self._works.append(work)  # passed groups are kept in order of completion

    def _is_due(self, work: GroupTask, rollout_id: int) -> bool:
        """Return whether the rollout must wait for this group: it would exceed the staleness bound in the next rollout, or
        was given up too often.
        """
        if not self._partial.enabled:
            return work.given_up >= MAX_GIVEN_UP
        oldest = work.journal.oldest_version
        return oldest is not None and rollout_id + 1 - oldest > self._partial.max_staleness

    def _awaits_due(self, passed: Sequence[GroupTask], coming: Sequence[GroupTask], rollout_id: int) -> bool:
        """Return whether due groups are unfinished and fewer than ``batch_size`` due groups have passed."""
        due = sum(self._is_due(work, rollout_id) for work in passed)
        return due < self._policy.batch_size and any(self._is_due(work, rollout_id) for work in coming)

    def _take(self, rollout_id: int) -> list[GroupTask]:
        """Take the groups of this rollout: due groups first, then in order of completion."""
        passed = [work for work in self._works if work.group is not None]
        passed.sort(key=lambda work: not self._is_due(work, rollout_id))
        selected = passed[: self._policy.batch_size]
        self._works = [work for work in self._works if work not in selected]
        return selected

    def _settle(self) -> None:
        """Keep the stopped groups, or give them up if partial rollouts are off."""
        self._counts["stopped_groups"] += len(self._works)
        if not self._partial.enabled:
            self._give_up(self._works)

    def _restart_stale(self, rollout_id: int) -> None:
        """Restart groups beyond the staleness bound: more were due than a rollout holds, or the bound was lowered."""
        oldest_allowed = rollout_id - self._partial.max_staleness
        ages = [(work, work.journal.oldest_version) for work in self._works]
        stale = [work for work, oldest in ages if oldest is not None and oldest < oldest_allowed]
        self._counts["restarted_groups"] += len(stale)
        self._give_up(stale)

    def _give_up(self, works: Sequence[GroupTask]) -> None:
        works = sorted(works, key=lambda work: work.group_id)
        self._works = [work for work in self._works if work not in works]
        self._prompts.give_back([QueuedPrompt(work.prompt, work.given_up + 1) for work in works])
        for work in works:
            self._counts["wasted_tokens"] += work.journal.num_tokens
            if work.task is not None:
                self._given_up.add(work.task)
                work.task.add_done_callback(self._forget)
                if not work.generated:  # let a reward finish: cancelling it would kill its process
                    work.task.cancel()

    def _forget(self, task: asyncio.Task[SampleGroup]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # nothing awaits this task: its prompt is answered again

    def _short(self, rollout_id: int, num_requested: int, num_passed: int) -> DataError:
        return DataError(
            f"rollout {rollout_id}: after rollout.max_refills={self._policy.max_refills} rounds of further prompts {num_passed} "
            f"of {num_requested} groups passed rollout.filters or may yet, and rollout.batch_size={self._policy.batch_size} are "
            "needed: raise rollout.max_refills, train on prompts that are neither too easy nor too hard, or set "
            "rollout.max_refills=0 to train on what passes"
        )
