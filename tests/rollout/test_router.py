"""Groups go where the least is outstanding, and what engines did is counted."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.interfaces import Completion
from slime_like.metrics.dictionary import unknown
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.client import EngineClient
from slime_like.rollout.router import Lease, Router
from slime_like.rollout.usage import Usage


def engines(n: int) -> list[EngineClient]:
    return [EngineClient(f"http://localhost:{i + 1}", admin_key="", name=str(i)) for i in range(n)]


def load(leases: list[Lease], n: int) -> list[int]:
    return [sum(lease.outstanding for lease in leases if lease.index == i) for i in range(n)]


@given(n=st.integers(1, 4), sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), max_size=40))
def test_no_engine_has_more_than_one_group_above_another(n: int, sizes: list[tuple[int, int]]) -> None:
    router = Router(engines(n))
    with ExitStack() as stack:
        leases: list[Lease] = []
        for size, _ in sizes:
            before = load(leases, n)
            leases.append(stack.enter_context(router.lease(size)))
            assert before[leases[-1].index] == min(before)
            assert leases[-1].engine is router.engines[leases[-1].index]
        found = load(leases, n)
        assert max(found) - min(found) <= max((size for size, _ in sizes), default=0)
        for lease, (size, spent) in zip(leases, sizes, strict=True):
            lease.spend(spent)
            assert lease.outstanding == max(0, size - spent)
    with router.lease(5) as lease:
        assert lease.index == 0  # nothing is left of the others


def completion(tokens: int, prompt: int, cached: int) -> Completion:
    return Completion(
        np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), ((0, tokens, 0),), "stop", prompt, cached
    )


def test_usage_by_hand() -> None:
    usage = Usage(2)
    usage.add(0, [completion(30, 10, 0), completion(10, 10, 8)])
    usage.add(1, [completion(20, 20, 2)])
    found = reduce_metrics(usage.drain())
    assert found == {
        "rollout/prefix_cache_hit_rate": 10 / 40,
        "rollout/avg_cached_tokens_per_sample": pytest.approx(10 / 3),
        "rollout/engine_load_max": 40 / 30,
    }
    assert unknown(found) == []
    assert usage.drain() == []
