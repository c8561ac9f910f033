"""Over-sampling: start more groups than a rollout needs, take the first that pass the filters, interrupt the others.

With partial rollouts, the next rollout continues an interrupted group under the weights that the engines then have. Otherwise
the group is aborted and its prompt moves to the front of the queue; if ``MAX_ABORTS`` groups of a prompt were aborted, a
rollout waits for the prompt's next group. In both cases no prompt is lost or used twice: at any time it is in one rollout,
dropped by a filter, in flight, or back in the queue.

Sources: over-sampling and partial rollouts as in slime (slime/rollout/sglang_rollout.py); the staleness bound of
continued groups as in AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1. A rollout waits for a group at the bound
instead of aborting it: mostly long responses become stale, and a run that never trained on them would learn to be brief.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.share import SINGLE, ManagerShare
from slime_like.interfaces import DataSource, Sampling
from slime_like.metrics.types import Metric, Sum
from slime_like.rollout.collect.collector import GroupCollector
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.sampler import GroupSampler, PauseGate
from slime_like.rollout.collect.state import PartialGroup, QueuedPrompt, RolloutState
from slime_like.types import Prompt, SampleGroup
from slime_like.util.deadline import Deadline

MAX_ABORTS = 3
DEFAULT_PARTIAL_STALENESS = 4  # versions beyond loop.max_staleness


def max_group_staleness(cfg: RolloutConfig, loop: LoopConfig) -> int:
    """Return the maximum number of weight versions that a group may lag behind the trainer when it is trained on."""
    if not cfg.partial_rollout:
        return loop.max_staleness + 1
    return cfg.max_partial_staleness or loop.max_staleness + DEFAULT_PARTIAL_STALENESS


@dataclass(slots=True, eq=False)
class GroupTask:
    """One group in flight."""

    group_id: int
    prompt: Prompt
    num_aborts: int = 0  # earlier groups of this prompt that were aborted
    journal: CallJournal = field(default_factory=CallJournal)
    is_generated: bool = False  # True once only the reward is missing
    task: asyncio.Task[SampleGroup] | None = None
    group: SampleGroup | None = None  # the group, once it is scored and has passed the filters

    def on_generated(self) -> None:
        """Mark the group as generated (only its reward is missing), and close its journal (``CallJournal.close``)."""
        self.is_generated = True
        self.journal.close()

    @property
    def running(self) -> asyncio.Task[SampleGroup]:
        """Return the group's task, which must have been started."""
        assert self.task is not None, f"group {self.group_id} was not begun"
        return self.task


class OverSamplingCollector(GroupCollector):
    """Collector whose groups in flight can outlive a rollout."""

    def __init__(
        self,
        cfg: RolloutConfig,
        sampling: Sampling,
        source: DataSource,
        sampler: GroupSampler,
        max_staleness: float,
        share: ManagerShare = SINGLE,
    ) -> None:
        """``max_staleness`` is the maximum number of weight versions that a continued group may lag behind the trainer when it
        is trained on; inf if no weights are pushed.
        """
        super().__init__(cfg, sampling, source, sampler, share)
        self._max_staleness = max_staleness
        self._gate = PauseGate(lambda: sampler.pool.router.no_engine_s)
        self._in_flight: list[GroupTask] = []
        self._finished_tasks: list[GroupTask] = []  # in order of completion; consumed by ``_filter_finished``
        self._aborted: set[asyncio.Task[SampleGroup]] = set()
        self._counts: Counter[str] = Counter()

    async def _collect(self, rollout_id: int) -> tuple[Sequence[SampleGroup], int, int]:
        """Return the first ``batch_size`` groups that pass the filters, the number of started groups, and the number of refills.

        The groups are ordered by id; required groups (``_is_required``) take precedence. If too few groups pass, return them if
        ``max_refills`` is 0, else raise ``DataError``. Any error, or a cancellation, cancels all groups.
        """
        try:
            return await self._collect_first(rollout_id)
        except BaseException:
            await self.close()
            raise

    async def _collect_first(self, rollout_id: int) -> tuple[Sequence[SampleGroup], int, int]:
        self._restart_stale(rollout_id)
        self._gate.open()
        batch_size, round_size, max_refills = self._batch_size, self._round_size, self._cfg.max_refills
        for group_task in self._in_flight:  # groups restored from an earlier process have no task yet
            if group_task.task is None:
                self._start(group_task)
        num_requested = self._start_groups(rollout_id, 0, round_size - len(self._in_flight))
        num_refills = 0
        while True:
            self._filter_finished()
            passed_groups = [group_task for group_task in self._in_flight if group_task.group is not None]
            unfinished = [group_task for group_task in self._in_flight if group_task.group is None]
            if len(passed_groups) >= batch_size and not self._waits_for_required(passed_groups, unfinished, rollout_id):
                break
            if len(passed_groups) + len(unfinished) < batch_size and num_refills < max_refills:
                num_requested += self._start_groups(rollout_id, num_requested, round_size)
                num_refills += 1
            elif len(passed_groups) + len(unfinished) < batch_size and max_refills:
                text = f"{len(passed_groups)} of {num_requested} groups passed rollout.filters or may still pass"
                raise self._too_few(rollout_id, text)
            elif unfinished:
                await asyncio.wait(
                    [group_task.running for group_task in unfinished], return_when=asyncio.FIRST_COMPLETED
                )
            else:
                break
        selected = self._select(rollout_id)
        await self._gate.shut(
            self._sampler.pool.abort_all, Deadline("rollout", "stop of a rollout", self._cfg.request_deadline_s)
        )
        self._keep_or_abort_interrupted()
        groups = sorted(
            (group_task.group for group_task in selected if group_task.group is not None),
            key=lambda group: group.group_id,
        )
        return groups, num_requested, num_refills

    def partial_groups(self) -> tuple[PartialGroup, ...]:
        """Return a snapshot of the groups in flight."""
        return tuple(
            PartialGroup(group_task.group_id, group_task.prompt, group_task.journal.copy())
            for group_task in self._in_flight
        )

    def restore(self, state: RolloutState) -> None:
        """Queue the prompts given back, and take over the partial groups of ``state``, which the next rollout continues.

        If partial rollouts are off, queue the prompts of these groups too, so that they start over.
        """
        if not self._cfg.partial_rollout:
            super().restore(state)
            return
        self._prompts.give_back(state.queued)
        self._in_flight = [
            GroupTask(partial.group_id, partial.prompt, journal=CallJournal(partial.calls))
            for partial in state.partial_groups
        ]

    def metrics(self) -> list[Metric]:
        """Return counts since the last call: groups stopped or restarted while in flight, and discarded tokens."""
        names = ("stopped_groups", "restarted_groups", "wasted_tokens")
        metrics: list[Metric] = [Sum(f"rollout/{name}", self._counts[name]) for name in names]
        self._counts.clear()
        return metrics

    async def close(self) -> None:
        """Cancel the tasks of all groups, aborted ones included, and wait until they have ended."""
        tasks = [*(group_task.task for group_task in self._in_flight if group_task.task is not None), *self._aborted]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- phases of a rollout -----------------------------------------------------------------------------------------
    def _start_groups(self, rollout_id: int, num_requested: int, num_groups: int) -> int:
        """Start ``num_groups`` more groups of this rollout, which has started ``num_requested`` so far.

        If ``num_groups`` is negative, start none. Return the number of started groups.
        """
        prompts = self._take(rollout_id, num_requested, max(0, num_groups))
        group_tasks = [GroupTask(group_id, queued.prompt, queued.num_aborts) for group_id, queued in prompts]
        self._in_flight += group_tasks
        for group_task in group_tasks:
            self._start(group_task)
        return len(group_tasks)

    def _start(self, group_task: GroupTask) -> None:
        request = self._request(group_task.group_id, group_task.prompt)
        group_task.task = asyncio.ensure_future(
            self._sampler.group(request, group_task.journal, self._gate, group_task.on_generated)
        )
        group_task.task.add_done_callback(lambda _: self._finished_tasks.append(group_task))

    def _filter_finished(self) -> None:
        """Apply the filters to finished groups. Raises the error of a failed group or filter."""
        finished_tasks, self._finished_tasks = self._finished_tasks, []
        for group_task in finished_tasks:
            if group_task not in self._in_flight:
                continue
            self._in_flight.remove(group_task)
            group = group_task.running.result()
            if self._filters.keep(group):
                group_task.group = group
                self._in_flight.append(group_task)  # passed groups are kept in order of completion

    def _is_required(self, group_task: GroupTask, rollout_id: int) -> bool:
        """Return whether this rollout must wait for the group.

        With partial rollouts, a rollout waits for a group that would exceed the staleness bound in the next rollout. Without
        them, it waits for a group whose prompt had ``MAX_ABORTS`` groups aborted.
        """
        if not self._cfg.partial_rollout:
            return group_task.num_aborts >= MAX_ABORTS
        oldest = group_task.journal.oldest_version
        return oldest is not None and rollout_id + 1 - oldest > self._max_staleness

    def _waits_for_required(
        self, passed_groups: Sequence[GroupTask], unfinished: Sequence[GroupTask], rollout_id: int
    ) -> bool:
        """Return whether required groups are unfinished and fewer than ``batch_size`` required groups have passed."""
        num_required = sum(self._is_required(group_task, rollout_id) for group_task in passed_groups)
        return num_required < self._batch_size and any(
            self._is_required(group_task, rollout_id) for group_task in unfinished
        )

    def _select(self, rollout_id: int) -> list[GroupTask]:
        """Remove up to ``batch_size`` passed groups from those in flight, and return them.

        Required groups come first, then the others; both in order of completion.
        """
        passed_groups = [group_task for group_task in self._in_flight if group_task.group is not None]
        passed_groups.sort(key=lambda group_task: not self._is_required(group_task, rollout_id))
        selected = passed_groups[: self._batch_size]
        self._in_flight = [group_task for group_task in self._in_flight if group_task not in selected]
        return selected

    def _keep_or_abort_interrupted(self) -> None:
        """Keep the groups that were not selected, or abort them if partial rollouts are off."""
        self._counts["stopped_groups"] += len(self._in_flight)
        if not self._cfg.partial_rollout:
            self._abort(self._in_flight)

    def _restart_stale(self, rollout_id: int) -> None:
        """Abort groups beyond the staleness bound, so that they start over.

        Such groups exist if more groups were required than fit into a rollout, or if the bound was lowered.
        """
        oldest_allowed = rollout_id - self._max_staleness
        ages = [(group_task, group_task.journal.oldest_version) for group_task in self._in_flight]
        stale_tasks = [group_task for group_task, oldest in ages if oldest is not None and oldest < oldest_allowed]
        self._counts["restarted_groups"] += len(stale_tasks)
        self._abort(stale_tasks)

    def _abort(self, group_tasks: Sequence[GroupTask]) -> None:
        group_tasks = sorted(group_tasks, key=lambda group_task: group_task.group_id)
        self._in_flight = [group_task for group_task in self._in_flight if group_task not in group_tasks]
        self._prompts.give_back(
            [QueuedPrompt(group_task.prompt, group_task.num_aborts + 1) for group_task in group_tasks]
        )
        for group_task in group_tasks:
            self._counts["wasted_tokens"] += group_task.journal.num_tokens
            if group_task.task is not None:
                self._aborted.add(group_task.task)
                group_task.task.add_done_callback(self._discard_aborted)
                if not group_task.is_generated:  # let a reward finish: cancelling it would kill its process
                    group_task.task.cancel()

    def _discard_aborted(self, task: asyncio.Task[SampleGroup]) -> None:
        self._aborted.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve the error, as nothing awaits this task: its prompt is sampled again
