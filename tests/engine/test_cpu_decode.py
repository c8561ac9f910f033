"""Every value of rollout.cpu_kernels gives the tokens and scores of SGLang's own forward pass, for any batch.

``auto`` selects C kernels if there is a compiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_like.interfaces import Completion
from slime_like_plugins.sglang_cpu.build import COMPILERS
from tests.engine.c_kernels import has_products
from tests.engine.closeness import assert_close
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer

pytestmark = pytest.mark.engine

type Work = Callable[[RunningEngine], Coroutine[Any, Any, list[Completion]]]


@pytest.fixture(scope="module")
def arms(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningEngine]]:
    """Return the engines by their setting; ``off`` is the reference."""
    with contextlib.ExitStack() as stack:
        launching: dict[str, Any] = {}
        for name in ("off", "torch", "auto"):
            run = launch(models, tmp_path_factory.mktemp(name), 1, cpu_kernels=name, server_type=ForkedEngineServer)
            launching[name] = stack.enter_context(contextlib.closing(run))
            next(run)
        yield {name: next(run) for name, run in launching.items()}


def assert_same(arms: dict[str, RunningEngine], work: Work) -> list[Completion]:
    """Assert equal tokens, finish reasons and versions, and logprobs up to rounding; return those of ``off``."""
    answers = {name: arm.run(work(arm)) for name, arm in arms.items()}
    expected = answers.pop("off")
    for name, completions in answers.items():
        for completion, reference in zip(completions, expected, strict=True):
            np.testing.assert_array_equal(completion.token_ids, reference.token_ids, err_msg=name)
            assert_close(completion.logprobs, reference.logprobs, name)
            assert (completion.finish, completion.versions) == (reference.finish, reference.versions)
    return expected


def test_each_engine_names_its_kernels(arms: dict[str, RunningEngine]) -> None:
    says = {name: arm.server.decode_method() for name, arm in arms.items()}
    assert says["off"].startswith("SGLang's own forward; module by module")
    assert says["torch"].startswith("torch kernels; fused forward of Qwen3ForCausalLM")
    if any(shutil.which(name) for name in COMPILERS):
        assert says["auto"].startswith("C kernels (")
    products = ", products packed by C" if has_products() else ""
    assert f"; fused forward of Qwen3ForCausalLM{products}; " in says["auto"]


def test_growing_and_shrinking_batches_at_mixed_temperatures_give_equal_tokens(arms: dict[str, RunningEngine]) -> None:
    """Greedy and sampled rows are mixed; requests of 1 to 60 tokens end, and others join, during decoding."""

    async def work(arm: RunningEngine) -> list[Completion]:
        requests = [
            asyncio.create_task(
                arm.client.generate(
                    prompt(3 + 7 * i % 40, seed=i), [i, 100 + i], make_sampling([0.0, 0.7, 1.0, 1.3][i % 4], n)
                )
            )
            for i, n in enumerate((60, 1, 33, 2, 17, 48, 5, 26))
        ]
        for i in range(3):  # these arrive while the first requests still run
            requests.append(
                asyncio.create_task(arm.client.generate(prompt(5, seed=50 + i), [i], make_sampling(tokens=20)))
            )
            await requests[-1]
        return [completion for request in requests for completion in await request]

    assert len(assert_same(arms, work)) == 19


def test_continuations_of_cached_prefixes_give_equal_tokens(arms: dict[str, RunningEngine]) -> None:
    async def work(arm: RunningEngine) -> list[Completion]:
        ids, completions = prompt(30, seed=4), list[Completion]()
        for turn in range(3):
            completions += await arm.client.generate(ids, [turn], make_sampling(0.9, 10))
            ids = np.concatenate([ids, completions[-1].token_ids]).astype(np.int32)
        return completions

    assert_same(arms, work)


def test_sampling_that_the_kernels_do_not_support_is_left_to_sglang(arms: dict[str, RunningEngine]) -> None:
    """Top-p, top-k and stop tokens work in one batch with plain requests."""

    async def work(arm: RunningEngine) -> list[Completion]:
        default = make_sampling(tokens=30)
        stop = replace(default, stop_token_ids=tuple(range(2, 30)))
        samplings = [default, replace(default, top_p=0.8), replace(default, top_k=5), stop]
        groups = [arm.client.generate(prompt(6, seed=9), [i, 7], sampling) for i, sampling in enumerate(samplings)]
        return [completion for group in await asyncio.gather(*groups) for completion in group]

    assert {completion.finish for completion in assert_same(arms, work)} == {"length", "stop"}


def test_the_first_token_after_a_push_is_of_the_new_weights(arms: dict[str, RunningEngine], models: Models) -> None:
    async def work(arm: RunningEngine) -> list[Completion]:
        completions: list[Completion] = []
        for version, name in ((1, "B"), (0, "A")):
            completions += await arm.client.generate(prompt(12), [3, 4], make_sampling())
            await arm.push(models.tensors(name), version)
        return completions

    first_a, _, first_b, _ = assert_same(arms, work)
    assert first_a.token_ids.tolist() != first_b.token_ids.tolist()


def test_retracted_requests_continue_with_equal_tokens(arms: dict[str, RunningEngine]) -> None:
    """A pause drops the KV cache of requests; after a resume, a prefill computes it again and decoding continues."""

    async def work(arm: RunningEngine) -> list[Completion]:
        request = asyncio.create_task(arm.client.generate(prompt(8), [1, 2, 3], make_sampling(tokens=120)))
        for _ in range(2):
            await arm.client.generate(prompt(4), [9], make_sampling(tokens=6))
            await arm.drop_prefixes()
        return await request

    assert_same(arms, work)
