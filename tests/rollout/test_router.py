"""Engine router: groups go to the least loaded engine while engines join and leave; usage metrics."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.errors import EngineError
from slime_like.interfaces import Completion
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool import router as router_module
from slime_like.rollout.pool.router import EngineAssignment, EngineRouter, RequestCounts


def engines(n: int) -> list[EngineClient]:
    return [EngineClient(f"http://localhost:{i + 1}", admin_key="", name=str(i)) for i in range(n)]


def load(assignments: list[EngineAssignment], among: list[EngineClient]) -> dict[EngineClient, int]:
    return {
        engine: sum(assignment.outstanding for assignment in assignments if assignment.engine is engine)
        for engine in among
    }


async def let_run() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


@given(n=st.integers(1, 4), sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), max_size=40))
def test_no_engine_has_more_than_one_group_above_another(n: int, sizes: list[tuple[int, int]]) -> None:
    router = EngineRouter(engines(n))
    with ExitStack() as stack:
        assignments: list[EngineAssignment] = []
        for size, _ in sizes:
            before = load(assignments, router.engines)
            assignments.append(stack.enter_context(router.assign(size)))
            assert assignments[-1].engine is not None
            assert before[assignments[-1].engine] == min(before.values())
        loads = load(assignments, router.engines).values()
        assert max(loads) - min(loads) <= max((size for size, _ in sizes), default=0)
        for assignment, (size, num_spent) in zip(assignments, sizes, strict=True):
            assignment.spend(num_spent)
            assert assignment.outstanding == max(0, size - num_spent)
    with router.assign(5) as assignment:
        assert assignment.engine is router.engines[0]  # the load of ended assignments is removed


@given(
    num_ranks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=40),
)
def test_a_group_goes_to_the_least_loaded_rank_of_its_engine(
    num_ranks: list[int], sizes: list[tuple[int, bool]]
) -> None:
    clients = [EngineClient("http://localhost:1", admin_key="", num_dp_ranks=num) for num in num_ranks]
    router = EngineRouter(clients)
    with ExitStack() as stack:
        assignments: list[EngineAssignment] = []
        for size, ends in sizes:
            outstanding: dict[tuple[EngineClient | None, int | None], int] = {}
            for assignment in assignments:
                rank = assignment.engine, assignment.dp_rank
                outstanding[rank] = outstanding.get(rank, 0) + assignment.outstanding
            last = stack.enter_context(router.assign(size))
            assert last.engine is not None
            if last.engine.num_dp_ranks == 1:
                assert last.dp_rank is None
            else:
                ranks = [outstanding.get((last.engine, rank), 0) for rank in range(last.engine.num_dp_ranks)]
                assert last.dp_rank == ranks.index(min(ranks))
            if ends:
                last.spend(size)
            assignments.append(last)


def test_a_group_that_changes_its_engine_gets_a_rank_of_the_new_one() -> None:
    async def scenario() -> None:
        one, two = (EngineClient("http://localhost:1", admin_key="", num_dp_ranks=num) for num in (1, 2))
        router = EngineRouter([one])
        with router.assign(5) as first, router.assign(5) as second:
            router.withdraw(one)
            router.admit(two)
            for assignment in (first, second, first):
                assert await router.wait_for_engine(assignment) is two
            assert (first.dp_rank, second.dp_rank) == (0, 1)

    asyncio.run(scenario())


def test_a_group_keeps_its_engine_until_it_is_withdrawn() -> None:
    async def scenario() -> None:
        a, b = engines(2)
        router = EngineRouter([a, b])
        with router.assign(10) as first, router.assign(1) as second:
            assert (first.engine, second.engine) == (a, b)
            first.spend(10)
            await router.wait_for_engine(second)
            assert second.engine is b  # although engine a has less load
            router.withdraw(b)
            assert router.serving_engine(second) is None  # no request goes to a withdrawn engine
            await router.wait_for_engine(second)
            assert second.engine is a
            router.admit(b)
            await router.wait_for_engine(second)
            assert second.engine is a
            with router.assign(1) as third:
                assert third.engine is b  # its load was reset when it was withdrawn
        assert router.engines == [a, b]

    asyncio.run(scenario())


def test_a_group_waits_for_an_engine_to_be_admitted() -> None:
    async def scenario() -> None:
        a, replacement = engines(2)
        router = EngineRouter([a])
        assigned: list[EngineClient | None] = []

        async def ask() -> None:
            with router.assign(1) as assignment:
                assert assignment.engine is None
                await router.wait_for_engine(assignment)
                assigned.append(assignment.engine)

        emptied = asyncio.create_task(router.wait_until_none_serves())
        router.withdraw(a)
        await emptied
        tasks = [asyncio.create_task(ask()) for _ in range(3)]
        await let_run()
        assert not assigned
        router.admit(replacement)
        await asyncio.gather(*tasks)
        assert assigned == [replacement] * 3

    asyncio.run(scenario())


def test_waiting_groups_get_the_fatal_error() -> None:
    async def scenario() -> None:
        router = EngineRouter([])

        async def ask() -> None:
            with router.assign(1) as assignment:
                await router.wait_for_engine(assignment)

        tasks = [asyncio.create_task(ask()) for _ in range(2)]
        await let_run()
        router.fail(EngineError("lost for good"))
        for task in (*tasks, asyncio.create_task(ask())):
            with pytest.raises(EngineError, match="lost for good"):
                await task

    asyncio.run(scenario())


def test_the_time_without_a_serving_engine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 4.0, 10.0, 10.5])
    monkeypatch.setattr(router_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    a, b = engines(2)
    router = EngineRouter([a, b])
    times = [router.no_engine_s]
    for engine in (a, b, b):
        router.withdraw(engine)  # none is left at 1
    router.admit(b)  # at 4
    router.admit(a)
    times.append(router.no_engine_s)
    router.withdraw(a)
    router.withdraw(b)  # at 10
    assert [*times, router.no_engine_s] == [0.0, 3.0, 3.5]  # the last at 10.5


def completion(tokens: int, prompt: int, cached: int) -> Completion:
    return Completion(
        np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), ((0, tokens, 0),), "stop", prompt, cached
    )


def test_usage_by_hand() -> None:
    usage = RequestCounts(2)
    usage.add("engine 0", [completion(30, 10, 0), completion(10, 10, 8)])
    usage.add("engine 1", [completion(20, 20, 2)])
    metrics = reduce_metrics(usage.drain())
    assert metrics == {
        "rollout/prefix_cache_hit_rate": 10 / 40,
        "rollout/avg_cached_tokens_per_sample": pytest.approx(10 / 3),
        "rollout/engine_load_max": 40 / 30,
    }
    assert unknown_names(metrics) == []
    assert usage.drain() == []


def test_cached_shares_of_several_managers_are_those_of_all_requests() -> None:
    requests = [[completion(30, 10, 0), completion(10, 10, 8)], [completion(20, 60, 3)]]
    single, parts = RequestCounts(1), [RequestCounts(1), RequestCounts(1)]
    for index, completions in enumerate(requests):
        single.add("engine", completions)
        parts[index].add("engine", completions)
    merged = reduce_metrics(metric for part in parts for metric in part.drain())
    assert merged == pytest.approx(reduce_metrics(single.drain()))
