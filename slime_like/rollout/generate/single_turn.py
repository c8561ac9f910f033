"""Default generate function: one prompt, one turn. A custom generate function has the same signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_like.data.routing import routing_column
from slime_like.interfaces import Completion, Engine, GenerateContext
from slime_like.types import Prompt, Sample, Source, Span, Status

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


async def single_turn(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Return one sample per seed, from one call of ``engine.generate``."""
    max_tokens = context.max_context_len - len(prompt.token_ids)
    sampling = replace(context.sampling, max_new_tokens=min(context.sampling.max_new_tokens, max_tokens))
    completions = await engine.generate(prompt.token_ids, seeds, sampling)
    return [
        to_sample(prompt, completion, context, seed=seed, index=index)
        for index, (completion, seed) in enumerate(zip(completions, seeds, strict=True))
    ]


def to_sample(prompt: Prompt, completion: Completion, context: GenerateContext, *, seed: int, index: int) -> Sample:
    """Return a completion as an episode: prompt span, then one span per weight version that sampled it."""
    start = len(prompt.token_ids)
    spans = [Span(0, start, Source.PROMPT)]
    spans += [Span(start + a, start + b, Source.MODEL, version) for a, b, version in completion.versions]
    sample_id = context.first_sample_id + index
    return Sample(
        group_id=context.group_id,
        episode_id=sample_id,
        sample_id=sample_id,
        seed=seed,
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
        logprobs=np.concatenate([np.full(start, np.nan), completion.logprobs]).astype(np.float32),
        spans=tuple(spans),
        status=STATUS.get(completion.finish, Status.FAILED),
        text=context.decode(completion.token_ids.tolist()),
        extras=routing_column(completion.routed_experts, start + len(completion.token_ids)),
    )
