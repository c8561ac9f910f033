"""Engine requests of a rollout manager: sampling settings of training and evaluation, and one seed per sample."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.share import SINGLE, ManagerShare
from slime_like.errors import ConfigError
from slime_like.interfaces import Completion, Engine, GenerateContext, Sampling
from slime_like.rollout.generate.single_turn import single_turn
from slime_like.rollout.manager import ManagerSpec, RolloutManager
from slime_like.rollout.pool.resize import PoolResizer
from slime_like.types import I32, Prompt, Reward, Sample, SampleGroup
from tests.rollout.counting import Counting
from tests.rollout.slow_engine import SlowEngine, SlowSupervisor

N, BATCH, STOP = 3, 2, 1
HELDOUT = {"greedy": [Prompt(0, np.array([3], np.int32), "", None, None, dataset="greedy")]}
HELDOUT["sampled"] = [replace(HELDOUT["greedy"][0], dataset="sampled")]


@dataclass(frozen=True)
class EngineRequest:
    """Request received by an engine."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling


class RecordingEngine(SlowEngine):
    """Engine that answers immediately and records its requests."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 0)
        self.requests: list[EngineRequest] = []
        self.groups: list[SampleGroup] = []  # groups collected from its answers

    async def extend(
        self,
        token_ids: Sequence[I32],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling,
        *,
        for_training: bool = True,
        dp_rank: int | None = None,
    ) -> list[Completion]:
        self.requests.append(EngineRequest(tuple(token_ids[0].tolist()), tuple(seeds), sampling))
        ids = np.array([5, 6, STOP], np.int32)
        return [Completion(ids, -ids.astype(np.float32), ((0, 3, 0),), "stop") for _ in seeds]


class FakeSupervisor(SlowSupervisor):
    """Supervisor of the only engine."""

    def __init__(self) -> None:
        self.tasks = []
        self.client = RecordingEngine()


async def cold(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Generate function with its own temperature."""
    return await single_turn(
        prompt, engine, seeds, replace(context, sampling=replace(context.sampling, temperature=0.3))
    )


async def cut(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Generate function with its own top_p, length limit and stop token."""
    sampling = replace(context.sampling, top_p=0.5, max_new_tokens=2, stop_token_ids=(9,))
    return await single_turn(prompt, engine, seeds, replace(context, sampling=sampling))


class Unscored:
    """Fake of both a reward pool and a tokenizer, without processes or files."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments of the reward pool or of the tokenizer."""

    async def score(self, groups: list[SampleGroup], **_: object) -> list[SampleGroup]:
        return [replace(g, samples=tuple(replace(s, reward=Reward(0.0)) for s in g.samples)) for g in groups]

    def metrics(self) -> tuple[()]:
        return ()

    warnings = take_recoveries = metrics

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return repr(token_ids)

    async def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RewardPool", "open_tokenizer"):
        monkeypatch.setattr(f"slime_like.rollout.manager.{name}", Unscored)


def run_engine(
    generate: str, *, rollouts: int = 0, evaluate: bool = False, pushes: bool = True, share: ManagerShare = SINGLE
) -> RecordingEngine:
    """Return the engine of a manager after a run's first rollouts, or after an evaluation."""
    spec = ManagerSpec(
        rollout=RolloutConfig(batch_size=BATCH, n_samples_per_prompt=N, max_response_len=40, generate=generate),
        reward=RewardConfig(),
        evaluation=EvalConfig(
            datasets={"greedy": "a.jsonl", "sampled": "b.jsonl"},
            n_samples_per_prompt=2,
            temperature=0.25,
            top_p=0.9,
            overrides={"sampled": {"temperature": 0.6, "top_k": 7, "max_response_len": 5}},
        ),
        loop=LoopConfig(num_rollout=9),
        health=HealthConfig(),
        tokenizer_path="",
        max_context_len=512,
        stop_token_ids=(STOP,),
        chat_template_kwargs={},
        temperature=0.8,
        seed=3,
        probe_sequences=0,
        first_rollout=0,
        deterministic=False,
        receives_pushes=pushes,
        share=share,
    )

    async def run() -> RecordingEngine:
        supervisor = FakeSupervisor()
        factory: Any = object()  # the number of engines does not change
        manager = RolloutManager(spec, Counting(), HELDOUT, [supervisor], factory)  # pyright: ignore[reportArgumentType]
        resizer = cast(PoolResizer, manager._resizer)
        assert list(resizer._slots) == [share.index], "further engines get numbers that no other manager uses"
        try:
            for rollout_id in range(rollouts):
                supervisor.client.groups += (await manager.collect(rollout_id)).groups
            if evaluate:
                await manager.evaluate()
        finally:
            await manager.stop()
        return supervisor.client

    return asyncio.run(run())


def requests_of(
    generate: str, *, rollouts: int = 0, evaluate: bool = False, pushes: bool = True
) -> list[EngineRequest]:
    """Return the engine's requests."""
    return run_engine(generate, rollouts=rollouts, evaluate=evaluate, pushes=pushes).requests


def test_every_sample_of_a_run_has_its_own_seed() -> None:
    requests = requests_of("single_turn", rollouts=2, evaluate=True)
    assert [len(a.seeds) for a in requests] == [N] * (2 * BATCH) + [2, 2]
    seeds = [seed for a in requests for seed in a.seeds]
    assert len(set(seeds)) == len(seeds)
    assert {a.sampling for a in requests[: 2 * BATCH]} == {Sampling(0.8, 40, 1.0, -1, (1,))}


def test_two_managers_send_the_requests_of_a_single_one() -> None:
    """Each prompt is answered once, with the group id and the seeds that it has in a run with one manager."""
    single = run_engine("single_turn", rollouts=3, evaluate=True)
    parts = [run_engine("single_turn", rollouts=3, evaluate=True, share=ManagerShare(i, 2)) for i in range(2)]
    by_id = {group.group_id: group for part in parts for group in part.groups}
    assert sorted(by_id) == [group.group_id for group in single.groups] == list(range(3 * BATCH))
    for group in single.groups:
        other = by_id[group.group_id]
        assert (other.prompt.prompt_id, [s.seed for s in other.samples]) == (
            group.prompt.prompt_id,
            [s.seed for s in group.samples],
        )
    merged_requests = [request for part in parts for request in part.requests]
    assert sorted(request.seeds for request in merged_requests) == sorted(request.seeds for request in single.requests)
    assert all(len(part.groups) == 3 * BATCH // 2 for part in parts)


def test_evaluations_use_the_settings_of_their_datasets() -> None:
    greedy, sampled = requests_of("single_turn", evaluate=True)
    assert greedy.sampling == Sampling(0.25, 40, 0.9, -1, (1,))
    assert sampled.sampling == Sampling(0.6, 5, 0.9, 7, (1,))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cold", "temperature=0.3 in training.* temperature=0.8: .*context.sampling.* or set rollout.temperature=0.3"),
        ("cut", "top_p=0.5 in training.* top_p=1: .*context.sampling"),
    ],
)
def test_a_generate_function_cannot_train_on_another_distribution(function: str, words: str) -> None:
    generate = f"tests.rollout.test_request_sampling:{function}"
    with pytest.raises(ConfigError, match=words):
        requests_of(generate, rollouts=1)
    assert len(requests_of(generate, evaluate=True)) == 2, "an evaluation may change the sampling"
    assert len(requests_of(generate, rollouts=1, pushes=False)) == BATCH, "so may a run without a trainer"


def test_the_stop_token_is_trained_on() -> None:
    """The stop token is sampled like every other; without a loss on it, a policy never learns to stop."""
    groups = run_engine("single_turn", rollouts=1).groups
    (step,) = assemble(groups, AssembleSpec(None, "token_mean", 1, 1, 1000, 40), 0).steps
    for row in (row for rank in step.micro_batches for row in rank):
        ends = row.cu_seqlens[1:] - 1
        assert (row.token_ids[ends] == STOP).all()
        assert (row.loss_weight[ends] > 0).all() and (row.rollout_logprobs[ends] == -STOP).all()
