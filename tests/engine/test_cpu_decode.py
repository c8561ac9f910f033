"""Every setting of rollout.cpu_kernels gives the tokens and scores of SGLang's own forward, whatever the batch does.

``engine`` is the shared one (C kernels, where there is a compiler); ``off`` and ``torch`` are started for this file.
"""

from __future__ import annotations

import asyncio
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
from tests.engine.conftest import Engine, Models, launch, prompt, sampled

pytestmark = pytest.mark.engine

type Work = Callable[[Engine], Coroutine[Any, Any, list[Completion]]]


@pytest.fixture(scope="module")
def arms(engine: Engine, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """``off`` first: it says what is right."""
    starting = {name: launch(models, tmp_path_factory.mktemp(name), 1, cpu_kernels=name) for name in ("off", "torch")}
    for one in starting.values():
        next(one)
    ready: dict[str, Engine] = {}
    for name, one in starting.items():
        other = next(one)
        assert other is not None
        ready[name] = other
    yield ready | {"auto": engine}
    for one in starting.values():
        one.close()


def assert_same(arms: dict[str, Engine], work: Work) -> list[Completion]:
    """Equal tokens, ends and versions, and scores as close as rounding allows; returns what SGLang's own forward answers."""
    answers = {name: arm.run(work(arm)) for name, arm in arms.items()}
    expected = answers.pop("off")
    for name, found in answers.items():
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids, err_msg=name)
            assert_close(mine.logprobs, theirs.logprobs, name)
            assert (mine.finish, mine.versions) == (theirs.finish, theirs.versions)
    return expected


def test_each_arm_is_what_it_says(arms: dict[str, Engine]) -> None:
    says = {name: arm.server.decodes_with() for name, arm in arms.items()}
    assert says["off"].startswith("SGLang's own forward; module by module")
    assert says["torch"].startswith("torch kernels; fused forward of Qwen3ForCausalLM")
    if any(shutil.which(name) for name in COMPILERS):
        assert says["auto"].startswith("C kernels (")
    products = ", products packed by C" if has_products() else ""
    assert f"; fused forward of Qwen3ForCausalLM{products}; " in says["auto"]


def test_batches_that_grow_and_shrink_at_mixed_temperatures(arms: dict[str, Engine]) -> None:
    """Greedy rows between sampled ones; requests of 1 to 60 tokens that end, and others that join, while it decodes."""

    async def work(arm: Engine) -> list[Completion]:
        requests = [
            asyncio.create_task(
                arm.client.generate(
                    prompt(3 + 7 * i % 40, seed=i), [i, 100 + i], sampled([0.0, 0.7, 1.0, 1.3][i % 4], n)
                )
            )
            for i, n in enumerate((60, 1, 33, 2, 17, 48, 5, 26))
        ]
        for i in range(3):  # joined by others, which arrive while the first still run
            requests.append(asyncio.create_task(arm.client.generate(prompt(5, seed=50 + i), [i], sampled(tokens=20))))
            await requests[-1]
        return [completion for request in requests for completion in await request]

    assert len(assert_same(arms, work)) == 19


def test_continuations_of_cached_prefixes(arms: dict[str, Engine]) -> None:
    async def work(arm: Engine) -> list[Completion]:
        ids, found = prompt(30, seed=4), list[Completion]()
        for turn in range(3):
            found += await arm.client.generate(ids, [turn], sampled(0.9, 10))
            ids = np.concatenate([ids, found[-1].token_ids]).astype(np.int32)
        return found

    assert_same(arms, work)


def test_what_the_kernels_do_not_handle_is_left_to_sglang(arms: dict[str, Engine]) -> None:
    """Nucleus, top-k and stop tokens, in one batch with plain requests."""

    async def work(arm: Engine) -> list[Completion]:
        plain = sampled(tokens=30)
        stop = replace(plain, stop_token_ids=tuple(range(2, 30)))
        asked = [plain, replace(plain, top_p=0.8), replace(plain, top_k=5), stop]
        groups = [arm.client.generate(prompt(6, seed=9), [i, 7], one) for i, one in enumerate(asked)]
        return [completion for group in await asyncio.gather(*groups) for completion in group]

    assert {completion.finish for completion in assert_same(arms, work)} == {"length", "stop"}


def test_a_push_in_place_is_seen_by_the_next_token(arms: dict[str, Engine], models: Models) -> None:
    async def work(arm: Engine) -> list[Completion]:
        found: list[Completion] = []
        for version, name in ((1, "B"), (0, "A")):
            found += await arm.client.generate(prompt(12), [3, 4], sampled())
            await arm.push(models.tensors(name), version)
        return found

    old, _, new, _ = assert_same(arms, work)
    assert old.token_ids.tolist() != new.token_ids.tolist()


def test_retracted_requests_go_on_where_they_were(arms: dict[str, Engine]) -> None:
    """Pause gives up their KV; resume computes it again by prefill, and decoding goes on."""

    async def work(arm: Engine) -> list[Completion]:
        request = asyncio.create_task(arm.client.generate(prompt(8), [1, 2, 3], sampled(tokens=120)))
        for _ in range(2):
            await arm.client.generate(prompt(4), [9], sampled(tokens=6))
            await arm.client.pause()
            await arm.client.flush()
            await arm.client.resume()
        return await request

    assert_same(arms, work)
