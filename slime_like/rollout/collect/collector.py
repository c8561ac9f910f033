"""Collection of a rollout's groups: in rounds that run to their end, or by over-sampling.

Without over-sampling, the prompts of a rollout depend only on their order, never on which answer came first, so a
resumed run takes the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.interfaces import Sampling
from slime_like.metrics.types import Metric
from slime_like.rollout.collect.group_filters import GroupFilters
from slime_like.rollout.collect.over_sampling import GroupTask, OverSampling, OverSamplingCallbacks, Partial
from slime_like.rollout.collect.prompt_queue import PromptQueue, QueuedPrompt
from slime_like.rollout.collect.refill import CollectedGroups, RefillPolicy, fill
from slime_like.rollout.collect.resumable import PauseGate
from slime_like.rollout.collect.sampler import GroupRequest, GroupSampler
from slime_like.rollout.collect.state import RolloutState
from slime_like.types import SampleGroup
from slime_like.util.deadline import Deadline


class GroupCollector:
    """Takes prompts, produces rollouts, and owns the groups in flight."""

    def __init__(
        self,
        cfg: RolloutConfig,
        sampling: Sampling,
        bound: int | None,
        prompts: PromptQueue,
        answers: GroupSampler,
        abort_all: Callable[[], Awaitable[None]],
    ) -> None:
        """``bound``: maximum staleness of continued groups; None if no weights are pushed, so nothing becomes stale.
        ``abort_all``: ends the requests of every engine with the tokens sampled so far.
        """
        self._cfg, self._sampling, self._prompts, self._answers = cfg, sampling, prompts, answers
        self._policy = RefillPolicy(cfg.batch_size, cfg.over_sampling_batch_size, cfg.max_refills)
        self._filters = GroupFilters(cfg)
        self._abort_all = abort_all
        self._gate = PauseGate()
        callbacks = OverSamplingCallbacks(self._answer, self._filters.keep, self._gate.open, self._stop)
        self._over_sampling: OverSampling | None = None
        if cfg.over_sampling_batch_size is not None:
            partial_rollout = Partial(cfg.partial_rollout, math.inf if bound is None else bound)
            self._over_sampling = OverSampling(self._policy, partial_rollout, prompts, callbacks)

    async def make(self, rollout_id: int) -> CollectedGroups:
        """Return the groups of one rollout, scored and filtered, ordered by id."""
        if self._over_sampling is not None:
            return await self._over_sampling.make(rollout_id)
        return await fill(partial(self._ask, rollout_id), self._filters.keep, self._policy, rollout_id)

    @property
    def filters(self) -> GroupFilters:
        """Return the run's filters, with the groups they saw since their last report."""
        return self._filters

    def metrics(self) -> list[Metric]:
        """Return the metrics of over-sampling since the last call."""
        return self._over_sampling.metrics() if self._over_sampling is not None else []

    def state(self) -> RolloutState:
        """Return the data cursor and every prompt that no rollout contains."""
        unfinished = self._over_sampling.unfinished() if self._over_sampling is not None else ()
        return RolloutState(self._prompts.source.state(), self._prompts.returned, unfinished)

    def restore(self, state: RolloutState) -> None:
        """Continue from ``state``. The data source must already be at its cursor."""
        self._prompts.give_back(state.returned)
        if self._over_sampling is not None:
            self._over_sampling.restore(state.unfinished)
        else:  # over-sampling was on when the checkpoint was written
            self._prompts.give_back([QueuedPrompt(unfinished.prompt) for unfinished in state.unfinished])

    async def close(self) -> None:
        """Cancel what is in flight."""
        if self._over_sampling is not None:
            await self._over_sampling.close()

    async def _ask(self, rollout_id: int, num_requested: int, count: int) -> list[SampleGroup]:
        """Return groups of ``count`` further prompts, after ``num_requested`` of this rollout."""
        first, n = rollout_id * self._policy.max_groups + num_requested, self._cfg.n_samples_per_prompt
        queued = enumerate(self._prompts.take(count), first)
        return await self._answers.groups(
            [GroupRequest(item.prompt, group_id, n, self._sampling) for group_id, item in queued]
        )

    async def _answer(self, work: GroupTask) -> SampleGroup:
        request = GroupRequest(work.prompt, work.group_id, self._cfg.n_samples_per_prompt, self._sampling)
        return await self._answers.group(request, work.journal, self._gate, work.on_generated)

    async def _stop(self) -> None:
        deadline = Deadline("rollout", "stop of a rollout", self._cfg.request_deadline_s)
        await self._gate.shut(self._abort_all, deadline)
