"""Over-sampling: start more groups than a rollout needs, take the first that pass the filters, interrupt the others.

With partial rollouts, the next rollout continues an interrupted group under its own weights. Otherwise the group is
aborted and its prompt moves to the front of the queue; after ``MAX_GIVEN_UP`` aborts the rollout waits for it. In both
cases every prompt is answered for exactly one rollout: at any time it is either taken, dropped by a filter, in flight,
or back in the queue.

Sources: over-sampling and partial rollouts as in slime (slime/rollout/sglang_rollout.py); the staleness bound of
continued groups as in AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1. A rollout waits for a group at the bound
instead of aborting it: mostly long answers become stale, and a run that never trained on them would learn to be brief.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.interfaces import DataSource, Sampling
from slime_like.metrics.types import Metric, Sum
from slime_like.rollout.collect.collector import GroupCollector
from slime_like.rollout.collect.resumable import PartialCompletions, PauseGate
from slime_like.rollout.collect.sampler import GroupSampler
from slime_like.rollout.collect.state import QueuedPrompt, RolloutState, Unfinished
from slime_like.types import Prompt, SampleGroup
from slime_like.util.deadline import Deadline

MAX_GIVEN_UP = 3
DEFAULT_PARTIAL_STALENESS = 4  # versions beyond loop.max_staleness


def max_group_staleness(cfg: RolloutConfig, loop: LoopConfig) -> int:
    """Return the number of versions that a group may lag behind the trainer when it is trained on."""
    if not cfg.partial_rollout:
        return loop.max_staleness + 1
    return cfg.max_partial_staleness or loop.max_staleness + DEFAULT_PARTIAL_STALENESS


@dataclass(slots=True, eq=False)
class GroupTask:
    """One group in flight."""

    group_id: int
    prompt: Prompt
    given_up: int = 0  # rollouts that started a group for this prompt and aborted it
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


class OverSampling(GroupCollector):
    """Collector whose groups in flight can outlive a rollout."""

    def __init__(
        self,
        cfg: RolloutConfig,
        sampling: Sampling,
        source: DataSource,
        sampler: GroupSampler,
        max_staleness: float,
    ) -> None:
        """``max_staleness`` is the number of versions that a continued group may lag behind the trainer when it is trained
        on; inf if no weights are pushed.
        """
        super().__init__(cfg, sampling, source, sampler)
        self._max_staleness = max_staleness
        self._gate = PauseGate()
        self._works: list[GroupTask] = []
        self._finished: list[GroupTask] = []  # in order of completion; consumed by ``_sift``
        self._given_up: set[asyncio.Task[SampleGroup]] = set()
        self._counts: Counter[str] = Counter()

    async def _collect(self, rollout_id: int) -> tuple[Sequence[SampleGroup], int, int]:
        """Return the first ``batch_size`` groups that pass, ordered by id, including groups at their staleness bound."""
        try:
            return await self._collect_first(rollout_id)
        except BaseException:
            await self.close()
            raise

    async def _collect_first(self, rollout_id: int) -> tuple[Sequence[SampleGroup], int, int]:
        self._restart_stale(rollout_id)
        self._gate.open()
        batch_size, max_refills = self._cfg.batch_size, self._cfg.max_refills
        round_size = self._cfg.over_sampling_batch_size or batch_size
        for work in self._works:  # restored from an earlier process
            if work.task is None:
                self._begin(work)
        num_requested = self._begin_further(rollout_id, 0, round_size - len(self._works))
        refills = 0
        while True:
            self._sift()
            passed = [work for work in self._works if work.group is not None]
            coming = [work for work in self._works if work.group is None]
            if len(passed) >= batch_size and not self._awaits_due(passed, coming, rollout_id):
                break
            if len(passed) + len(coming) < batch_size and refills < max_refills:
                num_requested += self._begin_further(rollout_id, num_requested, round_size)
                refills += 1
            elif len(passed) + len(coming) < batch_size and max_refills:
                text = f"{len(passed)} of {num_requested} groups passed rollout.filters or may still pass"
                raise self._too_few(rollout_id, text)
            elif coming:
                await asyncio.wait([work.running for work in coming], return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        selected = self._select(rollout_id)
        await self._gate.shut(
            self._sampler.pool.abort_all, Deadline("rollout", "stop of a rollout", self._cfg.request_deadline_s)
        )
        self._settle()
        groups = sorted((work.group for work in selected if work.group is not None), key=lambda group: group.group_id)
        return groups, num_requested, refills

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return a snapshot of the groups in flight."""
        return tuple(Unfinished(work.group_id, work.prompt, work.journal.copy()) for work in self._works)

    def restore(self, state: RolloutState) -> None:
        """Continue the groups that an earlier process had in flight, or queue their prompts if partial rollouts are off."""
        if not self._cfg.partial_rollout:
            super().restore(state)
            return
        self._prompts.give_back(state.returned)
        self._works = [
            GroupTask(item.group_id, item.prompt, journal=PartialCompletions(item.calls)) for item in state.unfinished
        ]

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
    def _begin_further(self, rollout_id: int, num_requested: int, count: int) -> int:
        """Start groups for ``count`` more prompts, after the ``num_requested`` of this rollout. Return the number started."""
        taken = self._take(rollout_id, num_requested, max(0, count))
        works = [GroupTask(group_id, item.prompt, item.given_up) for group_id, item in taken]
        self._works += works
        for work in works:
            self._begin(work)
        return len(works)

    def _begin(self, work: GroupTask) -> None:
        request = self._request(work.group_id, work.prompt)
        work.task = asyncio.ensure_future(self._sampler.group(request, work.journal, self._gate, work.on_generated))
        work.task.add_done_callback(lambda _: self._finished.append(work))

    def _sift(self) -> None:
        """Apply the filters to finished groups. Raises the error of a failed group."""
        finished, self._finished = self._finished, []
        for work in finished:
            if work not in self._works:
                continue
            self._works.remove(work)
            group = work.running.result()
            if self._filters.keep(group):
                work.group = group
                self._works.append(work)  # passed groups are kept in order of completion

    def _is_due(self, work: GroupTask, rollout_id: int) -> bool:
        """Return whether the rollout must wait for this group: it would exceed the staleness bound in the next rollout, or
        was aborted too often.
        """
        if not self._cfg.partial_rollout:
            return work.given_up >= MAX_GIVEN_UP
        oldest = work.journal.oldest_version
        return oldest is not None and rollout_id + 1 - oldest > self._max_staleness

    def _awaits_due(self, passed: Sequence[GroupTask], coming: Sequence[GroupTask], rollout_id: int) -> bool:
        """Return whether due groups are unfinished and fewer than ``batch_size`` due groups have passed."""
        due = sum(self._is_due(work, rollout_id) for work in passed)
        return due < self._cfg.batch_size and any(self._is_due(work, rollout_id) for work in coming)

    def _select(self, rollout_id: int) -> list[GroupTask]:
        """Take the groups of this rollout: due groups first, then in order of completion."""
        passed = [work for work in self._works if work.group is not None]
        passed.sort(key=lambda work: not self._is_due(work, rollout_id))
        selected = passed[: self._cfg.batch_size]
        self._works = [work for work in self._works if work not in selected]
        return selected

    def _settle(self) -> None:
        """Keep the interrupted groups, or abort them if partial rollouts are off."""
        self._counts["stopped_groups"] += len(self._works)
        if not self._cfg.partial_rollout:
            self._give_up(self._works)

    def _restart_stale(self, rollout_id: int) -> None:
        """Restart groups beyond the staleness bound: more groups were due than fit into a rollout, or the bound was lowered."""
        oldest_allowed = rollout_id - self._max_staleness
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
            task.exception()  # nothing awaits this task: its prompt is sampled again
