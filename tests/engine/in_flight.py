"""Requests that are in flight during two pushes, and the log-probabilities of each version for their tokens."""

from __future__ import annotations

import asyncio

import numpy as np

from slime_like.interfaces import Completion
from slime_like.types import F32, I32
from tests.engine.conftest import Models, RunningEngine, make_sampling

MAX_TRIES = 10
PUSHED_B, PUSHED_A = 3, 4  # versions; odd versions have the weights of B


def generate_over_two_pushes(
    engine: RunningEngine,
    models: Models,
    ids: I32,
    tokens: int,
    dp_rank: int | None = None,
    tokens_after_pushes: int | None = None,
) -> list[Completion]:
    """Return three completions, each sampled under the weights of A, then B, then A.

    If ``dp_rank`` is given, it computes all of them while other data-parallel ranks have no request; otherwise SGLang
    distributes them. They end with ``tokens`` tokens, or earlier if ``tokens_after_pushes`` is given: they are then aborted
    when a request that begins after the second push has sampled that many tokens. On a busy machine a request may begin after
    the first push or end before the second; all three are then sampled again.
    """

    async def sample(seeds: list[int], num_tokens: int) -> list[Completion]:
        sequences, sampling = [ids] * len(seeds), make_sampling(tokens=num_tokens)
        return await engine.client.extend(sequences, seeds, [num_tokens] * len(seeds), sampling, dp_rank=dp_rank)

    async def generate() -> list[Completion]:
        request = asyncio.create_task(sample([1, 2, 3], tokens))
        for version in (PUSHED_B, PUSHED_A):
            await sample([9], 8)  # by then the three requests usually have tokens
            await engine.push(models.tensors("AB"[version % 2]), version)
        if tokens_after_pushes is not None:
            await sample([9], tokens_after_pushes)
            await engine.client.abort_all()
        return await request

    versions_of_completions: list[list[int]] = []
    for _ in range(MAX_TRIES):
        completions = engine.run(generate())
        versions_of_completions = [[version for *_, version in completion.versions] for completion in completions]
        last_lengths = [stop - start for start, stop, _ in (completion.versions[-1] for completion in completions)]
        if (
            all(len(versions) == 3 and versions[1:] == [PUSHED_B, PUSHED_A] for versions in versions_of_completions)
            and min(last_lengths) > 1
        ):
            return completions
    raise AssertionError(
        f"in {MAX_TRIES} tries no completions of {tokens} tokens spanned two pushes; versions of the last ones: {versions_of_completions}"
    )


def logprobs_by_version(models: Models, ids: I32, completion: Completion) -> F32:
    """Return the log-probability of each sampled token under the weights of the token's version."""
    sequence, num_sampled = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
    logprobs = {name: models.logprobs(name, sequence, 1.0)[-num_sampled:] for name in "AB"}
    return np.concatenate([logprobs["AB"[version % 2]][start:stop] for start, stop, version in completion.versions])
