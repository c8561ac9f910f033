"""One prompt -> one scored group: engine, generate function, reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.interfaces import GenerateContext, GenerateFn, Sampling
from slime_like.reward.pool import RewardPool
from slime_like.rollout.journal import Journal
from slime_like.rollout.lane import Gate, Lane
from slime_like.rollout.router import Router
from slime_like.rollout.seeds import sample_seeds
from slime_like.rollout.usage import Usage
from slime_like.types import Prompt, SampleGroup

TRAIN_STREAM = "train"  # of sampling seeds; each held-out set has one of its own


@dataclass(frozen=True, slots=True)
class Asked:
    """``n`` samples of ``prompt``. Stream, group id and the run's seed decide the samples' seeds."""

    prompt: Prompt
    group_id: int
    n: int
    sampling: Sampling
    stream: str = TRAIN_STREAM


@dataclass(frozen=True, slots=True)
class Answerer:
    """Everything that all groups share."""

    router: Router
    rewards: RewardPool
    generate: GenerateFn
    tokenizer: Any  # of model.hf_checkpoint
    chat_template_kwargs: Mapping[str, Any]
    max_context_len: int
    seed: int
    usage: Usage  # of training groups

    async def group(
        self,
        asked: Asked,
        journal: Journal | None = None,
        gate: Gate | None = None,
        generated: Callable[[], None] | None = None,
    ) -> SampleGroup:
        """The scored group. ``journal`` holds what it has been answered before, ``gate`` is where its requests may have to
        wait; ``generated`` is called when only the rewards are missing.
        """
        n, first = asked.n, asked.group_id * asked.n
        seeds = sample_seeds(self.seed, asked.stream, first, n)
        context = GenerateContext(
            sampling=asked.sampling,
            decode=self._decode,
            group_id=asked.group_id,
            first_sample_id=first,
            max_context_len=self.max_context_len,
            tokenizer=self.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        is_training = asked.stream == TRAIN_STREAM
        usage = self.usage if is_training else Usage(1)  # that nobody reads
        with self.router.lease(asked.sampling.max_new_tokens * n) as lease:
            lane = Lane(lease, journal or Journal(), gate or Gate(), usage)
            samples = await self.generate(asked.prompt, lane, seeds, context)
        if generated is not None:
            generated()
        group = SampleGroup(asked.group_id, asked.prompt, tuple(samples))
        return (await self.rewards.score([group], unshaped=not is_training))[0]

    async def groups(self, asked: Sequence[Asked]) -> list[SampleGroup]:
        """All of them, in order; the first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self.group(one)) for one in asked]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer.result() for answer in answers]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
