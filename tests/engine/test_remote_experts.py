"""Engines with remote experts return the results of engines with all experts, over pushes and worker failures."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slime_like.config.schema import names
from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import Completion
from slime_like.types import F32
from tests.e2e.remote_workers import workers
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, payload, prompt
from tests.engine.fault_injection import EnginePair, at_first_answer, clear_callbacks, until
from tests.engine.forked_engines import REPOSITORY, ForkedEngineServer, start_fork_server
from tests.engine.forked_workers import WorkerForkingServer
from tests.engine.hybrid_models import build as build_hybrid
from tests.engine.latent_models import build as build_latent
from tests.engine.test_families import build
from tests.engine.test_faults import check_rollout
from tests.engine.test_latent import push

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5  # difference from an engine with all experts
OF_HF = 1e-4  # difference from transformers
DEADLINE_S = 5.0
HALF = RemoteOptions(count=4, capacity=64, deadline_s=DEADLINE_S)


@dataclass(frozen=True)
class ExpertArm:
    """An engine, and the models whose weights it serves in turn."""

    models: Models
    engine: RunningEngine

    @property
    def workers(self) -> list[psutil.Process]:
        """Worker processes of the engine's ranks."""
        return workers(self.engine.server.pid)

    @property
    def log(self) -> str:
        """The engine's log."""
        return Path(self.engine.server._spec.log_path).read_text()


ARMS: dict[str, dict[str, Any]] = {
    "all local": {},
    "batched shared": {"mode": "batched", "transport": "shared", "policy": "required"},
    "stream socket tp2": {
        "mode": "stream",
        "transport": "socket",
        "policy": "respawn",
        "experts": (0, 3, 5),
        "count": 0,
    },
    "float16 latent tp2 dcp2": {"payload_dtype": "float16", "policy": "fallback"},
}
STARTED = {"batched shared"}  # arms whose engine starts its worker as in a user's run; the other workers are forks
# The other families, in the combinations of mode, transport and payload that ``ARMS`` lacks.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"mode": "batched", "transport": "socket"},
    "minimax_m2": {"mode": "stream", "transport": "shared"},
    "deepseek_v2": {"mode": "auto", "transport": "socket"},
    "kimi_k2": {"mode": "auto", "transport": "shared"},
    "qwen3_5_moe_text": {"mode": "batched", "transport": "shared", "payload_dtype": "bfloat16"},
    "qwen3_5_moe": {"mode": "stream", "transport": "socket", "payload_dtype": "float16"},
}
OTHERS = {"qwen3_moe", "deepseek_v3", "qwen3_next"}  # families of ``ARMS``, and of tests/e2e/test_hybrid.py
DENSE = {"glm4", "llama", "mimo", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"}
BOUNDS = {"float16 latent tp2 dcp2": 2e-3}
PAYLOAD_BOUNDS = {"float32": TOLERANCE, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, ExpertArm]]:
    """Return the engine of each arm; the engines start at the same time."""
    qwen = build(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")
    latent = build_latent(tmp_path_factory.mktemp("latent"), "deepseek_v3")
    models = {name: latent if "latent" in name else qwen for name in ARMS}
    yield from start_arms({name: (models[name], options) for name, options in ARMS.items()}, tmp_path_factory)


def start_arms(
    arms: Mapping[str, tuple[Models, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, ExpertArm]]:
    """Yield an engine for each pair of models and settings of remote experts; the engines start at the same time."""
    start_fork_server()
    with contextlib.ExitStack() as stack:
        launching: dict[str, tuple[Models, Any]] = {}
        for name, (models, options) in arms.items():
            remote = replace(HALF, **options).to_json() if options else ""
            server_type = ForkedEngineServer if name in STARTED else WorkerForkingServer
            settings: dict[str, Any] = {"chunked_prefill_size": 48, "server_type": server_type}
            run = launch(
                models,
                tmp_path_factory.mktemp("run"),
                2 if "tp2" in name else 1,
                dcp=2 if "dcp2" in name else 1,
                remote_experts=remote,
                **settings,
            )
            stack.enter_context(contextlib.closing(run))
            assert next(run) is None
            launching[name] = models, run
        yield {name: ExpertArm(models, next(run)) for name, (models, run) in launching.items()}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, ExpertArm]]:
    """Return an engine of each family of experts that ``ARMS`` lacks."""
    builders: dict[str, Callable[[Path, str], Models]] = {
        "qwen3_5_moe_text": build_hybrid,
        "qwen3_5_moe": build_hybrid,
        "deepseek_v2": build_latent,
        "kimi_k2": build_latent,
    }
    yield from start_arms(
        {
            name: (builders.get(name, build)(tmp_path_factory.mktemp(name), name), {"policy": "fallback"} | options)
            for name, options in FAMILIES.items()
        },
        tmp_path_factory,
    )


def assert_close(logprobs: F32, expected: F32, bound: float) -> None:
    """Assert that differences are within ``bound``; nine in ten if payloads are rounded, which may change experts."""
    differences = np.abs(logprobs - expected)
    assert np.quantile(differences, 1.0 if bound <= OF_HF else 0.9) <= bound, differences


def compare(arm: ExpertArm, weights: str, bound: float, seed: int, plain: ExpertArm | None = None) -> None:
    """Assert that scores and samples agree with transformers, and greedy tokens with an engine that has all experts."""
    ids = prompt(100, seed=seed)
    (scores,) = arm.engine.run(arm.engine.client.score([ids], 1.0))
    assert_close(scores, arm.models.logprobs(weights, ids, 1.0), max(bound, OF_HF))
    for completion in arm.engine.run(arm.engine.client.generate(ids, [1, 2, 3], make_sampling(0.8, tokens=24))):
        sequence, num_sampled = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
        expected = arm.models.logprobs(weights, sequence, 0.8)[-num_sampled:]
        assert_close(completion.logprobs, expected, max(bound, OF_HF))
    if plain is not None:
        assert_same(results(arm, seed), results(plain, seed), bound)


def results(arm: ExpertArm, seed: int) -> tuple[F32, Completion]:
    """Return the scores of a prompt, and its greedy continuation."""
    ids = prompt(100, seed=seed)
    (scores,) = arm.engine.run(arm.engine.client.score([ids], 1.0))
    (greedy,) = arm.engine.run(arm.engine.client.generate(ids, [4], make_sampling(0.0, tokens=24)))
    return scores, greedy


def assert_same(actual: tuple[F32, Completion], expected: tuple[F32, Completion], bound: float) -> None:
    """Assert scores within ``bound`` and, unless payloads are rounded, equal greedy tokens with logprobs within it."""
    assert_close(actual[0], expected[0], bound)
    if bound == TOLERANCE:
        np.testing.assert_array_equal(actual[1].token_ids, expected[1].token_ids)
        np.testing.assert_allclose(actual[1].logprobs, expected[1].logprobs, rtol=0, atol=bound)


@pytest.mark.parametrize("name", [name for name in ARMS if name != "all local"])
def test_results_are_those_of_an_engine_with_all_experts(name: str, arms: Mapping[str, ExpertArm]) -> None:
    """Compare engines at the start and after pushes of interleaved tensors over shared memory and over a process group."""
    arm, plain = arms[name], arms["all local"] if name not in BOUNDS else None
    assert len(arm.workers) == (2 if "tp2" in name else 1)
    assert len(re.findall("slime_like remote experts: ", arm.log)) == len(arm.workers)
    for version, weights in enumerate("ABA"):
        for run in filter(None, (arm, plain)):
            if version:
                run.engine.run(push(run.engine, run.models.tensors(weights), version))
        compare(arm, weights, BOUNDS.get(name, TOLERANCE), seed=5 + version, plain=plain)


def test_a_partial_update_is_refused(arms: Mapping[str, ExpertArm]) -> None:
    """Push without a matrix of a remote expert, then with NaN in it; both ranks refuse. A complete push succeeds."""
    arm = arms["stream socket tp2"]
    tensors = arm.models.tensors("A")
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    part = {name: tensor for name, tensor in tensors.items() if name != missing}
    message = r"rank 0: 1 matrix: layer 1 w13 of remote expert 1 \(1536 of 3072 elements\); rank 1: 1 matrix"
    with pytest.raises(EngineError, match=message):
        arm.engine.run(arm.engine.push(part, 11))
    with pytest.raises(EngineError, match=message):
        arm.engine.run(arm.engine.push(tensors | {missing: tensors[missing] * float("nan")}, 12))
    arm.engine.run(arm.engine.push(tensors, 13))
    compare(arm, "A", TOLERANCE, seed=20)


def test_a_worker_that_is_killed_is_replaced(arms: Mapping[str, ExpertArm]) -> None:
    """Kill the worker of one of two ranks between requests, and of the other rank within an update."""
    arm = arms["stream socket tp2"]
    first, last = (worker.pid for worker in arm.workers)
    psutil.Process(last).send_signal(signal.SIGKILL)
    compare(arm, "A", TOLERANCE, seed=21)
    assert first in {worker.pid for worker in arm.workers} and last not in {worker.pid for worker in arm.workers}
    tensors = arm.models.tensors("B")

    async def send() -> None:
        names = [*tensors]
        half = len(names) // 2
        for part, victim in ((names[:half], first), (names[half:], None)):
            await arm.engine.client.update_from_tensors(payload({name: tensors[name] for name in part}))
            if victim is not None:
                psutil.Process(victim).send_signal(signal.SIGKILL)

    arm.engine.run(arm.engine.update(send(), 14))
    compare(arm, "B", TOLERANCE, seed=22)


def test_a_worker_that_is_stopped_is_replaced_by_the_engine(arms: Mapping[str, ExpertArm]) -> None:
    """Stop the worker of one of two ranks; the other rank keeps its worker."""
    arm = arms["float16 latent tp2 dcp2"]
    worker, other_worker = arm.workers
    worker.send_signal(signal.SIGSTOP)
    for version, weights in enumerate("AB", start=20):
        compare(arm, weights, BOUNDS["float16 latent tp2 dcp2"], seed=version)
        if version == 20:
            assert [process.pid for process in arm.workers] == [other_worker.pid]
            assert "the engine computes its experts itself" in arm.log
            arm.engine.run(push(arm.engine, arm.models.tensors("B"), 21))


def test_an_engine_ends_with_a_required_worker(arms: Mapping[str, ExpertArm]) -> None:
    """The engine is lost, so no later test uses it."""
    arm = arms["batched shared"]
    arm.workers[0].send_signal(signal.SIGKILL)
    with pytest.raises(EngineLost):
        arm.engine.run(arm.engine.client.generate(prompt(9), [0], make_sampling(tokens=4)))
    assert "remote experts are lost" in arm.engine.server.cause_of_death() + arm.log


def test_no_family_with_experts_is_left_out() -> None:
    page = (REPOSITORY / "docs" / "remote_experts.md").read_text()
    families = names.FAMILIES.keys() - DENSE
    assert families == FAMILIES.keys() | OTHERS
    assert {*re.findall(r"`(\w+)`", page.split("Engines of every family")[1].split("\n\n")[0])} == families


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, families: Mapping[str, ExpertArm]) -> None:
    """Results do not change once the worker is killed and the engine computes all experts itself."""
    arm, bound = families[family], PAYLOAD_BOUNDS[FAMILIES[family].get("payload_dtype", "float32")]
    compare(arm, "A", bound, seed=30)
    arm.engine.run(push(arm.engine, arm.models.tensors("B"), 30))
    compare(arm, "B", bound, seed=31)
    remote = results(arm, 32)
    (worker,) = arm.workers
    worker.send_signal(signal.SIGKILL)
    arm.engine.run(push(arm.engine, arm.models.tensors("B"), 31))  # also drops the cache
    assert not arm.workers and "the engine computes its experts itself" in arm.log
    assert_same(remote, results(arm, 32), bound)


def test_a_rollout_survives_the_loss_of_a_required_worker(arms: Mapping[str, ExpertArm], tmp_path: Path) -> None:
    """The other engine takes over the groups, and the restarted engine has a new worker and the pushed weights."""
    remote = replace(HALF, policy="required", threads=1).to_json()
    pair = EnginePair(arms["all local"].models, tmp_path, remote_experts=remote)

    async def scenario() -> None:
        manager = pair.manager()
        await pair.push(manager, "B")
        kills: list[tuple[str, int]] = []

        def kill_worker(name: str) -> None:
            (worker,) = workers(pair.supervisor(name).server.pid)
            worker.send_signal(signal.SIGKILL)
            kills.append((name, worker.pid))

        at_first_answer(kill_worker)
        check_rollout(await manager.collect(0), 0, pair.models, "B", pair.version)
        ((name, pid),) = kills
        await until(lambda: not [slot for slot in manager._pool.slots if slot.is_restarting])
        (recovery,) = manager._pool.recoveries
        assert recovery.engine == name and recovery.groups >= 1
        assert "remote experts are lost" in recovery.cause
        assert pid not in {worker.pid for worker in workers(pair.supervisor(name).server.pid)}
        assert await pair.push(manager, "A") == ("engine 0", "engine 1")
        check_rollout(await manager.collect(1), 1, pair.models, "A", pair.version)

    with contextlib.ExitStack() as stack:
        for action in (pair.close, pair.stop_managers, clear_callbacks):
            stack.callback(action)
        for supervisor in pair.supervisors:
            supervisor.connect()
        pair.loop.run_until_complete(scenario())
