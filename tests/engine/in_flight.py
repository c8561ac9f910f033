"""Answers that go on over two pushes, and what the weights of each of their tokens say."""

from __future__ import annotations

import asyncio

import numpy as np

from slime_like.interfaces import Completion
from slime_like.types import F32, I32
from tests.engine.conftest import Engine, Models, sampled

TRIES = 10
B, A = 3, 4  # the versions: odd ones are of the weights of B


def over_two_pushes(engine: Engine, models: Models, ids: I32, tokens: int) -> list[Completion]:
    """Three answers of three versions each; A's weights, those of B, A's again. On a busy machine one may begin late or end early: again."""

    async def once() -> list[Completion]:
        request = asyncio.create_task(engine.client.generate(ids, [1, 2, 3], sampled(tokens=tokens)))
        for version in (B, A):
            await engine.client.generate(ids, [9], sampled(tokens=8))  # by then the others mostly have tokens too
            await engine.push(models.tensors("AB"[version % 2]), version)
        return await request

    found: list[list[int]] = []
    for _ in range(TRIES):
        completions = engine.run(once())
        found = [[version for *_, version in completion.versions] for completion in completions]
        if all(len(versions) == 3 and versions[1:] == [B, A] for versions in found):
            return completions
    raise AssertionError(
        f"in {TRIES} tries no answers of {tokens} tokens went on over two pushes; the last ones: {found}"
    )


def by_version(models: Models, ids: I32, completion: Completion) -> F32:
    """Logprobs of sampled tokens, of each under the weights of its version."""
    whole, new = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
    of = {name: models.logprobs(name, whole, 1.0)[-new:] for name in "AB"}
    return np.concatenate([of["AB"[version % 2]][start:stop] for start, stop, version in completion.versions])
