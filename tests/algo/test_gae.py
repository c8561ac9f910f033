"""GAE, value loss and teacher advantage against recursions in Python floats, for any packing and dp."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algo import gae
from slime_like.algo.distill import ReverseKL
from slime_like.algo.gae import GeneralisedAdvantage
from slime_like.algo.value_loss import value_loss
from slime_like.algo_interfaces import TokenView
from slime_like.batch import PackedBatch, TrainBatch
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.config.schema.role_algo import DistillConfig, PpoConfig
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.errors import ConfigError
from slime_like.registry import resolve
from slime_like.types import Sample, SampleGroup, Source, Status
from tests.algo.samples import batches
from tests.algo.simulate import LocalReduce, ThreadReduce
from tests.hypothesis_examples import num_examples

FEW_EXAMPLES = settings(max_examples=num_examples(25), deadline=None)
Token = tuple[int, int]  # sample id, position
PPO = {
    "undiscounted": PpoConfig(normalize_advantages=False),
    "gae": PpoConfig(gamma=0.9, lambd=0.8, normalize_advantages=False),
    "kl in the reward": PpoConfig(gamma=0.95, lambd=0.5, kl_coef=0.3, normalize_advantages=False),
    "whitened": PpoConfig(gamma=0.9, lambd=0.95, kl_coef=0.1, kl_reward_type="k3"),
}
DISTILL = {
    "teacher alone": DistillConfig(opd_kl_coef=0.7),
    "with rewards": DistillConfig(opd_kl_coef=0.7, reward_coef=0.5),
    "with groups": DistillConfig(group_advantage="dr_grpo"),
    "whitened": DistillConfig(reward_coef=0.5, normalize_advantages=True),
}


def number(name: str, token: Token) -> float:
    """Return a pseudo-random score that depends on the name and the token only."""
    return 2 * math.sin(12.9898 * sum(name.encode()) + 78.233 * token[0] + 37.719 * token[1])


def column(micro_batch: PackedBatch, name: str) -> Tensor:
    """Return a float64 column [T] of scores."""
    out = np.zeros(len(micro_batch.token_ids))
    for s, (start, stop) in enumerate(zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True)):
        out[start:stop] = [number(name, (int(micro_batch.sample_ids[s]), t)) for t in range(stop - start)]
    return torch.tensor(out)


def view(micro_batch: PackedBatch) -> TokenView:
    def f64(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return TokenView(
        cu_seqlens=torch.tensor(micro_batch.cu_seqlens),
        loss_weight=f64(micro_batch.loss_weight),
        rewards=f64(micro_batch.rewards),
        advantages=None if micro_batch.advantages is None else f64(micro_batch.advantages),
        rollout_logprobs=f64(micro_batch.rollout_logprobs),
        old_logprobs=column(micro_batch, "old"),
        ref_logprobs=column(micro_batch, "ref"),
        teacher_logprobs=column(micro_batch, "teacher"),
        values=column(micro_batch, "values"),
    )


def assembled(groups: Sequence[SampleGroup], config: PpoConfig | DistillConfig, dp: int, budget: int) -> TrainBatch:
    name = config.group_advantage
    advantage = None if name is None else resolve("algo.group_advantage", name, GROUP_ADVANTAGES)
    return assemble(groups, AssembleSpec(advantage, config.aggregation, 1, dp, budget, 16), rollout_id=0)


def on_ranks(batch: TrainBatch, estimator: GeneralisedAdvantage | ReverseKL) -> list[dict[str, dict[Token, float]]]:
    """Return advantages, returns and diagnostics by token per dp rank. The ranks are threads that share a reduction."""
    (step,) = batch.steps
    reduce = ThreadReduce(len(step.micro_batches))

    def rank(d: int) -> dict[str, dict[Token, float]]:
        views = [view(micro_batch) for micro_batch in step.micro_batches[d]]
        columns = {"advantages": by_token(step.micro_batches[d], estimator(views, reduce.rank(d)))}
        if isinstance(estimator, GeneralisedAdvantage):
            columns["returns"] = by_token(step.micro_batches[d], estimator.returns(views))
        diagnostics = estimator.diagnose(views, reduce.rank(d))
        return columns | {name: {(0, 0): value} for name, value in diagnostics.items()}

    with ThreadPoolExecutor(len(step.micro_batches)) as threads:
        return list(threads.map(rank, range(len(step.micro_batches))))


def by_token(micros: Sequence[PackedBatch], columns: Sequence[Tensor]) -> dict[Token, float]:
    out: dict[Token, float] = {}
    for micro_batch, values in zip(micros, columns, strict=True):
        assert not values[torch.tensor(micro_batch.loss_weight == 0)].any()
        for s, (start, stop) in enumerate(zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True)):
            trained_positions = np.flatnonzero(micro_batch.loss_weight[start:stop] > 0)
            out |= {(int(micro_batch.sample_ids[s]), int(t)): float(values[start + t]) for t in trained_positions}
    return out


def merge_ranks(ranks: Sequence[dict[str, dict[Token, float]]], name: str) -> dict[Token, float]:
    return {token: value for rank in ranks for token, value in rank[name].items()}


# ---- reference, in Python floats -------------------------------------------------------------------------------------
def trained_positions(groups: Sequence[SampleGroup]) -> dict[int, tuple[Sample, list[int]]]:
    """Return {sample id: (sample, positions of its actions)}."""
    samples = [s for g in groups for s in g.samples if s.status not in (Status.FAILED, Status.ABORTED)]
    return {
        s.sample_id: (s, [t for p in s.spans if p.source is Source.MODEL for t in range(p.start, p.stop) if t])
        for s in samples
    }


def kl(config: PpoConfig, token: Token) -> float:
    log_ratio = number("old", token) - number("ref", token)
    return log_ratio if config.kl_reward_type == "k1" else math.exp(-log_ratio) - 1 + log_ratio


def naive_gae(groups: Sequence[SampleGroup], config: PpoConfig) -> tuple[dict[Token, float], dict[Token, float]]:
    """Return (advantages before whitening, returns), by backward recursion through each sample."""
    advantages: dict[Token, float] = {}
    returns: dict[Token, float] = {}
    for sample_id, (sample, actions) in trained_positions(groups).items():
        assert sample.reward is not None
        value_after, advantage = 0.0, 0.0
        for position in reversed(actions):
            token = (sample_id, position)
            reward = (sample.reward.score if position == actions[-1] else 0.0) - config.kl_coef * kl(config, token)
            delta = reward + config.gamma * value_after - number("values", token)
            advantage = delta + config.gamma * config.lambd * advantage
            value_after = number("values", token)
            advantages[token], returns[token] = advantage, advantage + value_after
    return advantages, returns


def whitened(values: dict[Token, float]) -> dict[Token, float]:
    mean = statistics.fmean(values.values())
    scale = math.sqrt(max(statistics.pvariance(values.values()), 1e-8))
    return {token: (value - mean) / scale for token, value in values.items()}


def explained(returns: dict[Token, float]) -> float:
    variance = statistics.pvariance(returns.values())
    residual = statistics.pvariance([value - number("values", token) for token, value in returns.items()])
    return 1 - residual / variance if variance > 1e-12 else 0.0


def naive_distillation(groups: Sequence[SampleGroup], config: DistillConfig) -> dict[Token, float]:
    out: dict[Token, float] = {}
    trained_samples = trained_positions(groups)
    for group in groups:
        members = [trained_samples[s.sample_id] for s in group.samples if s.sample_id in trained_samples]
        mean = statistics.fmean([s.reward.score for s, _ in members if s.reward]) if members else 0.0
        for sample, actions in members:
            assert sample.reward is not None
            group_advantage = sample.reward.score - mean if config.group_advantage else 0.0
            for token in [(sample.sample_id, position) for position in actions]:
                gap = number("teacher", token) - number("old", token)
                out[token] = config.opd_kl_coef * gap + config.reward_coef * sample.reward.score + group_advantage
    return whitened(out) if config.normalize_advantages else out


def equal_columns(actual: dict[Token, float], expected: dict[Token, float]) -> bool:
    return actual.keys() == expected.keys() and all(
        math.isclose(actual[token], expected[token], rel_tol=1e-5, abs_tol=1e-5) for token in expected
    )


# ---- tests -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PPO)
@FEW_EXAMPLES
@given(groups=batches(), dp=st.integers(1, 3), budget=st.integers(1, 30))
def test_gae_equals_the_recursion_in_any_packing(name: str, groups: list[SampleGroup], dp: int, budget: int) -> None:
    config = PPO[name]
    batch = assembled(groups, config, min(dp, sum(len(g.samples) for g in groups)), budget)
    ranks = on_ranks(batch, GeneralisedAdvantage(config))
    advantages, returns = naive_gae(groups, config)
    assert equal_columns(
        merge_ranks(ranks, "advantages"), whitened(advantages) if config.normalize_advantages else advantages
    )
    assert equal_columns(merge_ranks(ranks, "returns"), returns)
    variances = [rank["explained_variance"][0, 0] for rank in ranks]
    assert variances == pytest.approx([explained(returns)] * len(ranks), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", DISTILL)
@FEW_EXAMPLES
@given(groups=batches(), dp=st.integers(1, 3), budget=st.integers(1, 30))
def test_teacher_advantages_equal_the_reference_in_any_packing(
    name: str, groups: list[SampleGroup], dp: int, budget: int
) -> None:
    config = DISTILL[name]
    batch = assembled(groups, config, min(dp, sum(len(g.samples) for g in groups)), budget)
    ranks = on_ranks(batch, ReverseKL(config))
    expected = naive_distillation(groups, config)
    assert equal_columns(merge_ranks(ranks, "advantages"), expected)
    gap = statistics.fmean([number("old", token) - number("teacher", token) for token in expected])
    assert [rank["teacher_kl"][0, 0] for rank in ranks] == pytest.approx([gap] * len(ranks), rel=1e-6, abs=1e-6)


@FEW_EXAMPLES
@given(groups=batches())
def test_a_bootstrap_across_sequences_is_detected(groups: list[SampleGroup]) -> None:
    """Planted fault: the last action of a sequence bootstraps from the next sequence."""
    config = PPO["gae"]
    batch = assembled(groups, config, 1, 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gae, "is_last_action", lambda segment_A: torch.zeros_like(segment_A, dtype=torch.bool))
        faulty_result = on_ranks(batch, GeneralisedAdvantage(config))
    assert not equal_columns(merge_ranks(faulty_result, "advantages"), naive_gae(groups, config)[0])


@pytest.mark.parametrize("num_sequences", [2, 64, 1024])
def test_returns_count_as_constant_whatever_their_number(num_sequences: int) -> None:
    """Returns of +-5e-7 have a variance of 2.5e-13, below the threshold; those of +-5e-6 are above it."""
    signs = np.tile([1.0, -1.0], num_sequences // 2)
    for scale, expected in ((5e-7, 0.0), (5e-6, 1.0)):
        micro_batch = PackedBatch(
            token_ids=np.zeros(2 * num_sequences, np.int32),
            cu_seqlens=np.arange(0, 2 * num_sequences + 1, 2, dtype=np.int32),
            loss_weight=np.tile([0, 1], num_sequences).astype(np.float32),
            versions=np.zeros(2 * num_sequences, np.int32),
            rollout_logprobs=np.zeros(2 * num_sequences, np.float32),
            rewards=(scale * signs).astype(np.float32),
            advantages=None,
            sample_ids=np.arange(num_sequences, dtype=np.int64),
        )
        exact = replace(view(micro_batch), values=torch.tensor(np.repeat(micro_batch.rewards.astype(np.float64), 2)))
        diagnostics = GeneralisedAdvantage(PPO["undiscounted"]).diagnose([exact], LocalReduce())
        assert diagnostics["explained_variance"] == pytest.approx(expected)


def test_without_old_scores_rollout_logprobs_are_used() -> None:
    micro_batch = replace(_rows(), rollout_logprobs=np.array([0.0, -1.0, -2.0], np.float32))
    student = replace(view(micro_batch), old_logprobs=None)
    (advantages,) = ReverseKL(DistillConfig())([student], LocalReduce())
    teacher = column(micro_batch, "teacher")
    torch.testing.assert_close(advantages, torch.tensor([0.0, 1.0, 2.0]) + torch.where(advantages != 0, teacher, 0.0))


def _rows() -> PackedBatch:
    return PackedBatch(
        token_ids=np.zeros(3, np.int32),
        cu_seqlens=np.array([0, 3], np.int32),
        loss_weight=np.array([0, 0.5, 0.5], np.float32),
        versions=np.zeros(3, np.int32),
        rollout_logprobs=np.zeros(3, np.float32),
        rewards=np.ones(1, np.float32),
        advantages=None,
        sample_ids=np.zeros(1, np.int64),
    )


def test_a_rank_without_rows_participates() -> None:
    for estimator in (GeneralisedAdvantage(PpoConfig()), ReverseKL(DistillConfig(normalize_advantages=True))):
        assert estimator([], LocalReduce()) == []
        assert estimator.diagnose([], LocalReduce()) == {}


def test_a_config_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="algo=ppo"):
        GeneralisedAdvantage(GrpoConfig())
    with pytest.raises(ConfigError, match="algo=distill"):
        ReverseKL(GrpoConfig())


@FEW_EXAMPLES
@given(
    rows=st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20),
    clip=st.none() | st.floats(0.05, 2),
)
def test_value_loss_and_its_gradient(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    values, old, returns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    values = values.clone().requires_grad_()
    out = value_loss(values, old, returns, clip)
    (gradient,) = torch.autograd.grad(out.loss.sum(), values)
    for i, (v, o, r) in enumerate(rows):
        bounded = v if clip is None else min(max(v, o - clip), o + clip)
        clipped = (bounded - r) ** 2 > (v - r) ** 2
        assert float(out.loss[i].detach()) == pytest.approx(max((v - r) ** 2, (bounded - r) ** 2) / 2)
        if clip is not None:
            assert float(out.means["value_clipfrac"][i]) == float(clipped)
        at_bound = clip is not None and math.isclose(abs(v - o), clip)  # has one gradient on each side
        if not at_bound and (bounded == v or not math.isclose((bounded - r) ** 2, (v - r) ** 2, abs_tol=1e-9)):
            assert float(gradient[i]) == pytest.approx(0.0 if clipped else v - r, abs=1e-9)
