"""Default generate function: one prompt, one turn. A custom generate function has the same signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.data.routing import ROUTED_EXPERTS, routing_column
from slime_like.interfaces import Completion, Engine, GenerateContext
from slime_like.store.columns import TokenColumns, context_columns, join, sampled_columns
from slime_like.types import I32, Prompt, Sample, Status

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
    """Return the sample of a completion: a prompt span, then one span per weight version that sampled tokens."""
    columns = _columns(prompt.token_ids, completion)
    sample_id = context.first_sample_id + index
    return Sample(
        group_id=context.group_id,
        episode_id=sample_id,
        sample_id=sample_id,
        seed=seed,
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        spans=columns.spans(),
        status=STATUS.get(completion.finish, Status.FAILED),
        text=context.decode(completion.token_ids),
        extras={} if columns.experts is None else {ROUTED_EXPERTS: columns.experts},
    )


def _columns(prompt_ids: I32, completion: Completion) -> TokenColumns:
    """Return the columns of prompt and completion; they are views if one row of a store contains both."""
    prompt = context_columns(prompt_ids)
    if completion.row is not None:
        columns = completion.row.columns
        if len(columns) == len(prompt) + len(completion.token_ids) and columns.begins_with(prompt):
            return columns
    sampled = sampled_columns(completion.token_ids, completion.logprobs, completion.versions)
    columns = join([prompt, sampled])
    experts = routing_column(completion.routed_experts, len(columns)).get(ROUTED_EXPERTS)
    return replace(columns, experts=experts)
