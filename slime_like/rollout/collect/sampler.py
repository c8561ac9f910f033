"""Sampling of one scored group from one prompt: engine, generate function, reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime_like.errors import UserCodeError
from slime_like.interfaces import GenerateContext, GenerateFn, Sampling
from slime_like.reward.pool import RewardPool
from slime_like.rollout.collect.partial import PartialCompletions
from slime_like.rollout.collect.resumable import PauseGate, ResumableEngine
from slime_like.rollout.collect.seeds import sample_seeds
from slime_like.rollout.collect.usage import Usage
from slime_like.rollout.pool.router import EngineRouter
from slime_like.types import Prompt, Sample, SampleGroup
from slime_like.util.user_code import errors_named

TRAIN_STREAM = "train"  # stream of sampling seeds; each held-out set has its own


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for ``n`` samples of ``prompt``. Stream, group id and the run's seed determine the samples' seeds."""

    prompt: Prompt
    group_id: int
    n: int
    sampling: Sampling
    stream: str = TRAIN_STREAM


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Components shared by all groups."""

    router: EngineRouter
    rewards: RewardPool
    generate: GenerateFn
    generate_name: str  # rollout.generate, for messages
    tokenizer: Any  # of model.hf_checkpoint
    chat_template_kwargs: Mapping[str, Any]
    max_context_len: int
    seed: int
    usage: Usage  # of training groups
    trains: bool  # groups of the training stream are trained on

    async def group(
        self,
        request: GroupRequest,
        journal: PartialCompletions | None = None,
        gate: PauseGate | None = None,
        generated: Callable[[], None] | None = None,
    ) -> SampleGroup:
        """Return the scored group. ``journal`` has its earlier partial answers; requests wait at ``gate`` while it is shut;
        ``generated`` is called when only the rewards are missing.
        """
        n, first = request.n, request.group_id * request.n
        seeds = sample_seeds(self.seed, request.stream, first, n)
        context = GenerateContext(
            sampling=request.sampling,
            decode=self._decode,
            group_id=request.group_id,
            first_sample_id=first,
            max_context_len=self.max_context_len,
            tokenizer=self.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        is_training = request.stream == TRAIN_STREAM
        usage = self.usage if is_training else Usage(1)  # evaluation requests are not reported
        with self.router.lease(request.sampling.max_new_tokens * n) as lease:
            trained = request.sampling if is_training and self.trains else None
            engine = ResumableEngine(lease, journal or PartialCompletions(), gate or PauseGate(), usage, trained)
            subject = f"prompt {request.prompt.prompt_id} ({request.prompt.dataset})"
            with errors_named("rollout.generate", self.generate_name, subject):
                returned = await self.generate(request.prompt, engine, seeds, context)
            samples = self._checked(returned, subject)
        if generated is not None:
            generated()
        group = SampleGroup(request.group_id, request.prompt, samples)
        return (await self.rewards.score([group], unshaped=not is_training))[0]

    async def groups(self, requests: Sequence[GroupRequest]) -> list[SampleGroup]:
        """Return the groups of all requests, in order; the first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self.group(request)) for request in requests]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer.result() for answer in answers]

    def _checked(self, returned: object, subject: str) -> tuple[Sample, ...]:
        """Return the samples of a generate function. Raises ``UserCodeError`` when it returned anything else."""
        if isinstance(returned, Sequence):
            items = cast("Sequence[object]", returned)
            wrong = [item for item in items if not isinstance(item, Sample)]
            if items and not wrong:
                return tuple(cast("Sequence[Sample]", items))
            description = f"a list with {wrong[0]!r:.80} ({type(wrong[0]).__name__})" if wrong else "no sample"
        else:
            description = f"{returned!r:.80} ({type(returned).__name__})"
        raise UserCodeError(
            f"rollout.generate={self.generate_name} returned {description} for {subject}: it must return the samples of the group, "
            "at least one slime_like.types.Sample"
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
