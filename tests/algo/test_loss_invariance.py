"""Loss and gradient do not depend on packing order, micro-batching, dp or cp, and equal a float64 reference.

Invariance holds to 1e-9: the weights are equal float32 numbers for every packing. The reference agrees to 2e-6: it does
not round weights and advantages to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.batch import TrainBatch
from slime_like.config.schema.algo import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
    SftConfig,
)
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.config.schema.policy import AlgoConfig, PolicyGradientConfig
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.registry import resolve
from slime_like.types import SampleGroup, Status
from tests.algo.reference import reference
from tests.algo.samples import SampleShape, batches, groups_of
from tests.algo.simulate import ForwardOnlySum, LocalReduce, Policies, Policy, SimulatedStep, simulate
from tests.hypothesis_examples import num_examples

MAX_RESPONSE_LEN = 16
ALGORITHMS: dict[str, AlgoConfig] = {
    "grpo": GrpoConfig(),
    "grpo_sequence_mean": GrpoConfig(aggregation="sequence_mean"),
    "grpo_everything": GrpoConfig(
        eps_clip=0.1, eps_clip_high=0.3, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01, use_tis=True
    ),
    "grpo_k1": GrpoConfig(kl_loss_coef=0.2, kl_loss_type="k1"),
    "grpo_k2": GrpoConfig(kl_loss_coef=0.2, kl_loss_type="k2"),
    "grpo_mis": GrpoConfig(use_mis=True, mis_low=0.3, mis_high=2.0),
    "grpo_product": GrpoConfig(rejection="product", rejection_low=0.1, rejection_high=8.0, kl_loss_coef=0.1),
    "grpo_rollout": GrpoConfig(use_rollout_logprobs=True, eps_clip=0.6),
    "dr_grpo": DrGrpoConfig(entropy_coef=0.02),
    "rloo": RlooConfig(eps_clip_c=1.5, use_tis=True, tis_clip=1.5, tis_clip_low=0.5),
    "dapo": DapoConfig(mask_truncated=True),
    "gspo": GspoConfig(),
    "gspo_everything": GspoConfig(
        eps_clip=0.2,
        eps_clip_high=0.6,
        eps_clip_c=1.8,
        entropy_coef=0.01,
        kl_loss_coef=0.1,
        rejection="geometric",
        rejection_low=0.6,
        rejection_high=3.0,
        use_mis=True,
    ),
    "cispo": CispoConfig(eps_clip=0.3, eps_clip_high=0.4),
    "reinforce_pp_baseline": ReinforcePlusPlusBaselineConfig(kl_coef=0.1, kl_reward_type="k1"),
    "reinforce_pp": ReinforcePlusPlusConfig(),
    "reinforce_pp_kl": ReinforcePlusPlusConfig(gamma=0.9, kl_coef=0.1, kl_reward_type="k2", use_tis=True),
    "sft": SftConfig(),
}
FEW_EXAMPLES = settings(max_examples=num_examples(8), deadline=None)


def batch_of(
    groups: Sequence[SampleGroup], config: AlgoConfig, dp: int = 1, budget: int = 10_000, steps: int = 1
) -> TrainBatch:
    name = config.group_advantage
    advantage = None if name is None else resolve("algo.group_advantage", name, GROUP_ADVANTAGES)
    spec = AssembleSpec(
        advantage, config.aggregation, steps, dp, budget, MAX_RESPONSE_LEN, getattr(config, "mask_truncated", False)
    )
    return assemble(groups, spec, rollout_id=0)


def policies(with_old: bool) -> Policies:
    return Policies(Policy.random(1), Policy.random(2), Policy.random(3) if with_old else None)


def assert_same(actual: SimulatedStep, expected: SimulatedStep, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=rtol, atol=rtol)
    torch.testing.assert_close(actual.gradient, expected.gradient, rtol=rtol, atol=rtol)
    assert [*actual.means] == [*expected.means]
    means = [list(step.means.values()) for step in (actual, expected)]
    np.testing.assert_allclose(*means, rtol=rtol, atol=rtol, err_msg=str([*expected.means]))


def shuffled(groups: Sequence[SampleGroup], seed: int) -> list[SampleGroup]:
    """Return the groups and samples in another order."""
    rng = np.random.default_rng(seed)
    shuffled_groups = [replace(g, samples=tuple(g.samples[i] for i in rng.permutation(len(g.samples)))) for g in groups]
    return [shuffled_groups[i] for i in rng.permutation(len(shuffled_groups))]


@pytest.mark.parametrize("name", ALGORITHMS)
@FEW_EXAMPLES
@given(
    groups=batches(),
    dp=st.integers(1, 3),
    cp=st.integers(1, 3),
    budget=st.integers(1, 30),
    seed=st.integers(0, 99),
    old=st.booleans(),
)
def test_the_loss_equals_the_reference_for_every_packing_dp_and_cp(
    name: str, groups: list[SampleGroup], dp: int, cp: int, budget: int, seed: int, old: bool
) -> None:
    config, models = ALGORITHMS[name], policies(old)
    dp = min(dp, sum(len(g.samples) for g in groups))
    expected = simulate(batch_of(groups, config), config, models)
    spread = simulate(batch_of(shuffled(groups, seed), config, dp, budget), config, models, cp=cp)
    assert_same(spread[0], expected[0])
    loss, gradient = reference(groups, config, models, MAX_RESPONSE_LEN)
    for result in (spread[0], expected[0]):
        np.testing.assert_allclose(result.loss, loss, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(result.gradient, gradient, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
@FEW_EXAMPLES
@given(groups=batches(), dp=st.integers(1, 2), budget=st.integers(1, 30))
def test_each_of_two_steps_is_independent_of_layout(name: str, groups: list[SampleGroup], dp: int, budget: int) -> None:
    config, models = ALGORITHMS[name], policies(with_old=True)
    groups = [*groups, *groups_of([[SampleShape((1, 2, 0, 0), 0.0, Status.COMPLETED)] * 2] * 2, seed=5)]
    expected = simulate(batch_of(groups, config, steps=2), config, models)
    spread = simulate(batch_of(groups, config, dp, budget, steps=2), config, models)
    for a, b in zip(spread, expected, strict=True):
        assert_same(a, b)


UNEVEN = groups_of(
    [
        [SampleShape((2, 3, 0, 0), 1.0, Status.COMPLETED), SampleShape((2, 5, 1, 2), 0.0, Status.COMPLETED)],
        [
            SampleShape((1, 4, 0, 0), 0.25, Status.COMPLETED),
            SampleShape((1, 1, 0, 0), -2.0, Status.COMPLETED),
            SampleShape((1, 2, 0, 0), 1.0, Status.TRUNCATED),
        ],
    ]
)


def differs(actual: SimulatedStep, gradient: torch.Tensor) -> bool:
    return not torch.allclose(actual.gradient, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", [GrpoConfig(), DrGrpoConfig()], ids=["grpo", "dr_grpo"])
def test_normalising_across_groups_is_detected(config: PolicyGradientConfig) -> None:
    """Planted fault, known in the field: uneven groups are normalised as one."""
    models = policies(with_old=False)
    _, gradient = reference(UNEVEN, config, models, MAX_RESPONSE_LEN)
    samples = tuple(replace(s, group_id=0, episode_id=s.sample_id) for g in UNEVEN for s in g.samples)
    faulty_result = simulate(batch_of([replace(UNEVEN[0], samples=samples)], config), config, models)[0]
    correct_result = simulate(batch_of(UNEVEN, config), config, models)[0]
    assert differs(faulty_result, gradient)
    assert not differs(correct_result, gradient)


def test_a_denominator_per_micro_batch_is_detected() -> None:
    config, models = GrpoConfig(), policies(with_old=False)
    _, gradient = reference(UNEVEN, config, models, MAX_RESPONSE_LEN)
    batch = batch_of(UNEVEN, config, budget=9)
    shard = batch.steps[0].micro_batches[0]
    assert len(shard) > 1
    renormalised = [replace(row, loss_weight=row.loss_weight / (row.loss_weight.sum() * len(shard))) for row in shard]
    faulty = replace(batch, steps=(replace(batch.steps[0], micro_batches=(tuple(renormalised),)),))
    assert differs(simulate(faulty, config, models)[0], gradient)


def test_whitening_per_rank_is_detected() -> None:
    config, models = ReinforcePlusPlusConfig(), policies(with_old=False)
    _, gradient = reference(UNEVEN, config, models, MAX_RESPONSE_LEN)
    batch = batch_of(UNEVEN, config, dp=2)
    assert differs(simulate(batch, config, models, local_reduce=True)[0], gradient)
    assert not differs(simulate(batch, config, models)[0], gradient)


SEQUENCE_RATIO = GspoConfig(eps_clip=2.0, eps_clip_high=9.0)  # nothing is clipped: every fault reaches the gradient
REJECTION = GrpoConfig(
    rejection="product", rejection_high=5.0
)  # between the ratio of a sequence and those of its two parts


@pytest.mark.parametrize("config", [SEQUENCE_RATIO, REJECTION], ids=["gspo", "rejection"])
def test_a_sequence_sum_over_one_rank_only_is_detected(config: PolicyGradientConfig) -> None:
    models = policies(with_old=True)
    _, gradient = reference(UNEVEN, config, models, MAX_RESPONSE_LEN)
    batch = batch_of(UNEVEN, config)
    assert not differs(simulate(batch, config, models, cp=2)[0], gradient)
    assert differs(simulate(batch, config, models, cp=2, sequence_reduce=lambda _: LocalReduce())[0], gradient)


def test_a_sequence_sum_without_other_ranks_gradients_is_detected() -> None:
    models = policies(with_old=True)
    _, gradient = reference(UNEVEN, SEQUENCE_RATIO, models, MAX_RESPONSE_LEN)
    faulty_result = simulate(
        batch_of(UNEVEN, SEQUENCE_RATIO), SEQUENCE_RATIO, models, cp=2, sequence_reduce=ForwardOnlySum
    )[0]
    assert differs(faulty_result, gradient)
    assert abs(faulty_result.loss - simulate(batch_of(UNEVEN, SEQUENCE_RATIO), SEQUENCE_RATIO, models)[0].loss) < 1e-9
