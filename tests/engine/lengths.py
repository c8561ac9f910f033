"""A generate function whose answers are long for every other prompt, so that some requests are always in flight.

The function sets the reward itself, because long answers would end while a reward process starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slime_like.interfaces import Completion, Engine, GenerateContext
from slime_like.rollout.generate.single_turn import to_sample
from slime_like.types import Prompt, Reward, Sample

NUM_SHORT, NUM_LONG = 4, 200


async def long_for_odd_prompts(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Sample up to ``NUM_SHORT`` tokens, or exactly ``NUM_LONG`` for odd prompts, plus the index of the sample."""
    min_tokens, stops = (NUM_LONG, ()) if prompt.prompt_id % 2 else (NUM_SHORT, context.sampling.stop_token_ids)

    async def ask(index: int, seed: int) -> Completion:
        sampling = replace(context.sampling, max_new_tokens=min_tokens + index, stop_token_ids=stops)
        (completion,) = await engine.generate(prompt.token_ids, [seed], sampling)
        return completion

    completions = await asyncio.gather(*(ask(index, seed) for index, seed in enumerate(seeds)))
    samples = [
        to_sample(prompt, completion, context, seed=seed, index=index)
        for index, (completion, seed) in enumerate(zip(completions, seeds, strict=True))
    ]
    return [replace(sample, reward=Reward(float(sample.num_response_tokens % 2 == 0))) for sample in samples]
