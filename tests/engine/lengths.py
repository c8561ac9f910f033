"""A generate function whose answers are long for every other prompt, so that some are always on their way.

It scores them itself: while a reward's process starts, the long ones would end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slime_like.interfaces import Completion, Engine, GenerateContext
from slime_like.rollout.generate.single_turn import to_sample
from slime_like.types import Prompt, Reward, Sample

SHORT, LONG = 4, 200


async def long_for_odd_prompts(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """``SHORT`` tokens, fewer where a stop token comes, or ``LONG`` ones; one more for each further sample."""
    least, stops = (LONG, ()) if prompt.prompt_id % 2 else (SHORT, context.sampling.stop_token_ids)

    async def ask(index: int, seed: int) -> Completion:
        sampling = replace(context.sampling, max_new_tokens=least + index, stop_token_ids=stops)
        (completion,) = await engine.generate(prompt.token_ids, [seed], sampling)
        return completion

    completions = await asyncio.gather(*(ask(index, seed) for index, seed in enumerate(seeds)))
    samples = [
        to_sample(prompt, completion, context, seed=seed, index=index)
        for index, (completion, seed) in enumerate(zip(completions, seeds, strict=True))
    ]
    return [replace(sample, reward=Reward(float(sample.num_response_tokens % 2 == 0))) for sample in samples]
