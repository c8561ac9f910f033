"""Engines are killed and stopped during rollouts: each sample is made exactly once, restarted engines join at a push.

The second engine has data-parallel attention.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from slime_like.errors import EngineError, EngineLost
from slime_like.rollout.engine.processes import stopped_pids
from slime_like.rollout.selection import ManagerRollout
from tests.engine.closeness import assert_close
from tests.engine.conftest import Models
from tests.engine.fault_injection import (
    GROUPS,
    SAMPLES,
    TOKENS,
    EnginePair,
    ObservedClient,
    at_answer,
    at_first_answer,
    clear_callbacks,
    record_answers,
    until,
)

pytestmark = pytest.mark.engine
RECOVERY_METRICS = ("rollout/engine_restarts", "rollout/remade_groups")


@pytest.fixture(scope="module")
def pair(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    engine_pair = EnginePair(models, tmp_path_factory.mktemp("faults"), dp_attention=2)
    try:
        for supervisor in engine_pair.supervisors:
            supervisor.connect()
        yield engine_pair
    finally:
        engine_pair.close()


@pytest.fixture(autouse=True)
def no_fault(pair: EnginePair) -> Iterator[None]:
    yield
    clear_callbacks()
    pair.stop_managers()


def check_rollout(collected: ManagerRollout, rollout_id: int, models: Models, model: str, version: int) -> None:
    """Assert that every sample occurs once, is complete, and was sampled from these weights."""
    base = rollout_id * GROUPS
    assert [group.group_id for group in collected.groups] == list(range(base, base + GROUPS))
    ids = [sample.sample_id for group in collected.groups for sample in group.samples]
    assert ids == list(range(base * SAMPLES, (base + GROUPS) * SAMPLES))
    for group in collected.groups:
        for sample in group.samples:
            assert sample.versions == (version,)
            assert 0 < sample.num_response_tokens <= TOKENS
        sample = group.samples[0]
        num_sampled = sample.num_response_tokens
        expected = models.logprobs(model, sample.token_ids, 1.0)[-num_sampled:]
        assert_close(sample.logprobs[-num_sampled:], expected)


def test_on_stalled_engine_wait_waits_for_a_stall(pair: EnginePair) -> None:
    async def scenario() -> None:
        manager = pair.manager(on_stalled_engine="wait", interval_s=0.2, timeout_s=3.0)
        assert await pair.push(manager, "B") == ("engine 0", "engine 1")
        at_answer("engine 0", 1, lambda: pair.supervisors[0].send_signal(signal.SIGSTOP))
        collecting = asyncio.ensure_future(manager.collect(0))
        await until(lambda: [slot for slot in manager._pool.slots if slot.is_stalled])
        assert not collecting.done()
        pair.supervisors[0].send_signal(signal.SIGCONT)
        collected = await collecting
        check_rollout(collected, 0, pair.models, "B", pair.version)
        assert any("does not respond; waiting for it" in message for message in collected.messages)
        assert manager.last_recoveries() == ()
        await until(lambda: not [slot for slot in manager._pool.slots if slot.is_stalled])
        assert await pair.push(manager, "A") == ("engine 0", "engine 1")
        await manager.stop()

    pair.loop.run_until_complete(scenario())


def test_a_slow_engine_is_not_restarted_by_default(pair: EnginePair) -> None:
    """An engine that is stopped for less than the timeout of a health check loses no group."""

    async def scenario() -> None:
        manager = pair.manager(interval_s=0.1, timeout_s=60.0)
        await pair.push(manager, "A")
        pids = [supervisor.server.pid for supervisor in pair.supervisors]
        stopped_engines: list[str] = []
        answered_engines = record_answers()

        def stop(name: str) -> None:
            pair.supervisor(name).send_signal(signal.SIGSTOP)
            stopped_engines.append(name)
            answered_engines.clear()

        at_first_answer(stop)
        collecting = asyncio.ensure_future(manager.collect(0))
        await until(lambda: stopped_engines)
        client, group = pair.supervisor(stopped_engines[0]).client, pair.supervisor(stopped_engines[0]).server.pid
        assert isinstance(client, ObservedClient)
        await until(
            lambda: stopped_pids(group) and set(answered_engines) - set(stopped_engines) and client.num_waiting_checks
        )
        assert not collecting.done()
        answered_engines.clear()
        os.killpg(group, signal.SIGCONT)
        collected = await collecting
        check_rollout(collected, 0, pair.models, "A", pair.version)
        assert stopped_engines[0] in answered_engines  # the groups in flight when the engine was stopped
        assert {m.name: m.value for m in collected.metrics if m.name in RECOVERY_METRICS} == dict.fromkeys(
            RECOVERY_METRICS, 0
        )
        assert (collected.recoveries, collected.messages, manager.last_recoveries()) == ((), (), ())
        assert [supervisor.server.pid for supervisor in pair.supervisors] == pids
        await manager.stop()

    pair.loop.run_until_complete(scenario())


def test_a_rollout_survives_the_loss_of_both_engines(pair: EnginePair) -> None:
    """One engine continues alone. When it is lost too, the first restarted engine gets weights and ends the rollout."""

    async def scenario() -> None:
        manager = pair.manager(timeout_s=6.0)  # SGLang checks once a second whether its worker lives, and exits if not
        await pair.push(manager, "B")
        signalled: list[str] = []

        def kill_one_stop_the_other(name: str) -> None:
            signalled.extend(sorted(("engine 0", "engine 1"), key=name.__ne__))
            pair.supervisor(name).kill_scheduler()
            at_answer(signalled[1], 2, lambda: pair.supervisor(signalled[1]).send_signal(signal.SIGSTOP))

        at_first_answer(kill_one_stop_the_other)
        collecting = asyncio.ensure_future(manager.collect(0))
        push_needed = asyncio.ensure_future(manager.wait_until_push_needed())
        await asyncio.wait({collecting, push_needed}, return_when=asyncio.FIRST_COMPLETED)
        assert push_needed.done() and not collecting.done()
        await pair.push(manager, "A")
        collected = await collecting
        for group in collected.groups:
            assert {sample.versions for sample in group.samples} <= {(pair.version - 1,), (pair.version,)}
        remade_groups = [group for group in collected.groups if group.oldest_version == pair.version]
        assert 0 < len(remade_groups) < GROUPS
        ids = [sample.sample_id for group in collected.groups for sample in group.samples]
        assert ids == list(range(GROUPS * SAMPLES))
        assert len(collected.recoveries) == 2
        assert {recovery.version for recovery in collected.recoveries} <= {-1, pair.version}
        await until(lambda: not [slot for slot in manager._pool.slots if slot.is_restarting])
        death, stall = manager._pool.recoveries
        assert [death.engine, stall.engine] == signalled
        assert pair.version in {death.version, stall.version}
        assert death.cause.startswith("dead: ")
        assert "no response to a health check" in stall.cause
        assert death.groups + stall.groups == sum(
            m.value for m in collected.metrics if m.name == "rollout/remade_groups"
        )
        assert death.groups >= 1 and stall.groups >= len(remade_groups)
        assert await pair.push(manager, "B") == ("engine 0", "engine 1")
        check_rollout(await manager.collect(1), 1, pair.models, "B", pair.version)
        assert len(await manager.probe()) == 2, manager._pool.recoveries
        await manager.stop()

    pair.loop.run_until_complete(scenario())


def test_an_engine_that_dies_during_a_push_is_left_out_and_joins_the_next_push(pair: EnginePair) -> None:
    async def scenario() -> None:
        manager = pair.manager()
        engines_before = await pair.begin_push(manager)
        with pytest.raises(EngineLost, match="engine 1"):
            await pair.send(engines_before, "A", action=lambda: pair.supervisors[1].send_signal(signal.SIGKILL))
        engines_after = await pair.begin_push(manager)
        assert engines_after == ("engine 0",)
        await pair.send(engines_after, "A")
        pair.version += 1
        await manager.commit_push(pair.version)
        (scores,) = await manager.probe()
        assert_close(scores.logprobs[0], pair.models.logprobs("A", scores.token_ids[0], 1.0))
        check_rollout(await manager.collect(0), 0, pair.models, "A", pair.version)
        await until(lambda: not [slot for slot in manager._pool.slots if slot.is_restarting])
        assert await pair.push(manager, "B") == ("engine 0", "engine 1")
        probe_scores = await manager.probe()
        assert len(probe_scores) == 2
        for scores in probe_scores:
            assert_close(scores.logprobs[0], pair.models.logprobs("B", scores.token_ids[0], 1.0))
        (recovery,) = manager.last_recoveries()
        assert (recovery.engine, recovery.version) == ("engine 1", pair.version)
        check_rollout(await manager.collect(1), 1, pair.models, "B", pair.version)
        await manager.stop()

    pair.loop.run_until_complete(scenario())


def test_on_dead_engine_stop_ends_the_run_if_a_push_loses_an_engine(pair: EnginePair) -> None:
    async def scenario() -> None:
        manager = pair.manager(on_dead_engine="stop")
        names = await pair.begin_push(manager)
        with pytest.raises(EngineLost, match="engine 1"):
            await pair.send(names, "A", action=lambda: pair.supervisors[1].send_signal(signal.SIGKILL))
        with pytest.raises(EngineError, match="engine 1"):
            await manager.begin_push()
        await manager.abort_push()
        await manager.stop()
        single_engine_manager = pair.manager(engines=1)
        assert await pair.push(single_engine_manager, "A") == ("engine 0",)
        await single_engine_manager.stop()

    pair.loop.run_until_complete(scenario())


def test_on_dead_engine_stop_ends_the_run_if_a_rollout_loses_an_engine(pair: EnginePair) -> None:
    async def scenario() -> None:
        manager = pair.manager(engines=1, on_dead_engine="stop")
        at_answer("engine 0", 1, lambda: pair.supervisors[0].send_signal(signal.SIGKILL))
        with pytest.raises(EngineError, match="engine 0"):
            await manager.collect(0)
        await manager.stop()

    pair.loop.run_until_complete(scenario())
