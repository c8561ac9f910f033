"""Over-sampling: more groups are begun than a rollout needs, the first that pass the filters are taken, the rest is stopped.

What is stopped is continued in the next rollout, under its weights (partial rollouts), or given up, and its prompt
comes back before all others; one that has been given up ``MOST_GIVEN_UP`` times is waited for. Either way every prompt is
answered for a rollout once: it is taken, dropped by a filter, in flight, or back in the queue, and in no two of these.

Sources: over-sampling and partial rollouts as slime has them (slime/rollout/sglang_rollout.py); the bound on the age of
what is continued as in AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1. A group that has reached it is waited for
rather than given up: it is the long answers that grow old, and a run that never trained on them would learn to be brief.
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

MOST_GIVEN_UP = 3


@dataclass(slots=True, eq=False)
class GroupTask:
    """One group on its way."""

    group_id: int
    prompt: Prompt
    given_up: int = 0  # rollouts that have begun an answer to this prompt and given it up
    journal: PartialCompletions = field(default_factory=PartialCompletions)
    generated: bool = False  # only its reward is missing
    task: asyncio.Task[SampleGroup] | None = None
    group: SampleGroup | None = None  # scored, and passed the filters

    def on_generated(self) -> None:
        """Only its reward is missing from here."""
        self.generated = True
        self.journal.close()

    @property
    def running(self) -> asyncio.Task[SampleGroup]:
        """Its task."""
        assert self.task is not None, f"group {self.group_id} was not begun"
        return self.task


@dataclass(frozen=True, slots=True)
class Partial:
    """What becomes of groups that are stopped."""

    enabled: bool  # they are continued
    max_staleness: float  # versions that a group may lag behind the trainer when it is trained on; inf: none is pushed


@dataclass(frozen=True, slots=True)
class OverSamplingCallbacks:
    """What over-sampling needs done."""

    answer: Callable[[GroupTask], Awaitable[SampleGroup]]  # run a group to its end
    keep: Callable[[SampleGroup], bool]  # ask the filters
    go: Callable[[], None]  # let requests be sent
    stop: Callable[[], Awaitable[None]]  # end all requests and send no more: journals hold what was sampled


class OverSampling:
    """The groups in flight, across rollouts."""

    def __init__(self, how: RefillPolicy, partial: Partial, prompts: PromptQueue, hands: OverSamplingCallbacks) -> None:
        self._how, self._partial, self._prompts, self._hands = how, partial, prompts, hands
        self._works: list[GroupTask] = []
        self._finished: list[GroupTask] = []  # in the order they finished; looked at by ``_sift``
        self._given_up: set[asyncio.Task[SampleGroup]] = set()
        self._counts: Counter[str] = Counter()

    async def make(self, rollout_id: int) -> CollectedGroups:
        """The first ``batch_size`` groups that pass, in the order of their ids, those at their staleness bound included.

        Raises ``DataError`` when ``max_refills`` rounds did not do, and what a group's making raised.
        """
        try:
            return await self._make(rollout_id)
        except BaseException:
            await self.close()
            raise

    async def _make(self, rollout_id: int) -> CollectedGroups:
        self._restart_stale(rollout_id)
        self._hands.go()
        round_size = self._how.round_size or self._how.batch_size
        for work in self._works:  # of an earlier process
            if work.task is None:
                self._begin(work)
        asked = self._ask(rollout_id, 0, round_size - len(self._works))
        refills = 0
        while True:
            self._sift()
            passed = [work for work in self._works if work.group is not None]
            coming = [work for work in self._works if work.group is None]
            if len(passed) >= self._how.batch_size and not self._awaits_due(passed, coming, rollout_id):
                break
            if len(passed) + len(coming) < self._how.batch_size and refills < self._how.max_refills:
                asked += self._ask(rollout_id, asked, round_size)
                refills += 1
            elif len(passed) + len(coming) < self._how.batch_size and self._how.max_refills:
                raise self._short(rollout_id, asked, len(passed))
            elif coming:
                await asyncio.wait([work.running for work in coming], return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        taken = self._take(rollout_id)
        await self._hands.stop()
        self._settle()
        groups = sorted((work.group for work in taken if work.group is not None), key=lambda group: group.group_id)
        return CollectedGroups(tuple(groups), asked, refills)

    def unfinished(self) -> tuple[Unfinished, ...]:
        """What is in flight, as it is now."""
        return tuple(Unfinished(work.group_id, work.prompt, work.journal.copy()) for work in self._works)

    def restore(self, unfinished: Iterable[Unfinished]) -> None:
        """Take up what an earlier process had in flight, or answer its prompts anew where partial rollouts are off."""
        if self._partial.enabled:
            self._works = [
                GroupTask(found.group_id, found.prompt, journal=PartialCompletions(found.calls)) for found in unfinished
            ]
        else:
            self._prompts.give_back([QueuedPrompt(found.prompt) for found in unfinished])

    def metrics(self) -> list[Metric]:
        """Since the last call."""
        names = ("stopped_groups", "restarted_groups", "wasted_tokens")
        found: list[Metric] = [Sum(f"rollout/{name}", self._counts[name]) for name in names]
        self._counts.clear()
        return found

    async def close(self) -> None:
        """Cancel everything."""
        tasks = [*(work.task for work in self._works if work.task is not None), *self._given_up]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _ask(self, rollout_id: int, before: int, count: int) -> int:
        """Begin groups of ``count`` further prompts, ``before`` having been begun for this rollout; how many."""
        first = rollout_id * self._how.most + before
        taken = enumerate(self._prompts.take(max(0, count)), first)
        works = [GroupTask(group_id, waiting.prompt, waiting.given_up) for group_id, waiting in taken]
        self._works += works
        for work in works:
            self._begin(work)
        return len(works)

    def _begin(self, work: GroupTask) -> None:
        work.task = asyncio.ensure_future(self._hands.answer(work))
        work.task.add_done_callback(lambda _: self._finished.append(work))

    def _sift(self) -> None:
        """Ask the filters about what has finished. What it raised is raised."""
        finished, self._finished = self._finished, []
        for work in finished:
            if work not in self._works:
                continue
            self._works.remove(work)
            group = work.running.result()
            if self._hands.keep(group):
                work.group = group
                self._works.append(work)  # those that passed stand in the order in which they finished

    def _is_due(self, work: GroupTask, rollout_id: int) -> bool:
        """Whether it is to be waited for: it would be too old in the next rollout, or has been given up too often."""
        if not self._partial.enabled:
            return work.given_up >= MOST_GIVEN_UP
        oldest = work.journal.oldest_version
        return oldest is not None and rollout_id + 1 - oldest > self._partial.max_staleness

    def _awaits_due(self, passed: Sequence[GroupTask], coming: Sequence[GroupTask], rollout_id: int) -> bool:
        """Whether groups to be waited for are on their way, and the rollout is not full of such groups."""
        due = sum(self._is_due(work, rollout_id) for work in passed)
        return due < self._how.batch_size and any(self._is_due(work, rollout_id) for work in coming)

    def _take(self, rollout_id: int) -> list[GroupTask]:
        """Those due first, then in the order in which they finished."""
        passed = [work for work in self._works if work.group is not None]
        passed.sort(key=lambda work: not self._is_due(work, rollout_id))
        taken = passed[: self._how.batch_size]
        self._works = [work for work in self._works if work not in taken]
        return taken

    def _settle(self) -> None:
        """Keep what was stopped, or give it up."""
        self._counts["stopped_groups"] += len(self._works)
        if not self._partial.enabled:
            self._give_up(self._works)

    def _restart_stale(self, rollout_id: int) -> None:
        """What is older than it may be is answered anew: more were due at once than a rollout holds, or the bound sank."""
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
                if not work.generated:  # a reward is left to end: its process would have to be killed
                    work.task.cancel()

    def _forget(self, task: asyncio.Task[SampleGroup]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for it: its prompt is answered anew

    def _short(self, rollout_id: int, asked: int, passed: int) -> DataError:
        return DataError(
            f"rollout {rollout_id}: after rollout.max_refills={self._how.max_refills} rounds of further prompts {passed} "
            f"of {asked} groups passed rollout.filters or may yet, and rollout.batch_size={self._how.batch_size} are "
            "needed: raise rollout.max_refills, train on prompts that are neither too easy nor too hard, or set "
            "rollout.max_refills=0 to train on what passes"
        )
