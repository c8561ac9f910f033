"""Losses at single tokens: clipped policy gradient, GSPO, CISPO, corrections, and finite values everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import torch

from slime_like.algo.loss import PackedSequences, cispo, gspo, policy_gradient, sft
from slime_like.algo_interfaces import LossOutput, LossView
from slime_like.config.rules.algorithms import LOSS_SCHEMAS
from slime_like.config.schema.algo import CispoConfig, GrpoConfig, GspoConfig, SftConfig
from slime_like.config.schema.names import LOSSES
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig
from slime_like.metrics.dictionary import unknown_names
from slime_like.registry import resolve
from tests.algo.simulate import LocalReduce


def view(ratios: list[float], advantages: list[float]) -> LossView:
    """Return a view of tokens whose probabilities are ``ratios`` times the old ones."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros(len(ratios), dtype=torch.float64)
    ones = torch.full_like(zeros, 1 / len(ratios))
    return LossView(logprobs, None, ones, torch.tensor(advantages, dtype=torch.float64), zeros, zeros, zeros)


def run(config: PolicyConfig, tokens: LossView) -> tuple[LossOutput, torch.Tensor]:
    output: LossOutput = resolve("algo.loss", config.loss, LOSSES)(config)(tokens)
    return output, torch.autograd.grad(output.loss.sum(), tokens.logprobs)[0]


def test_clipping_stops_only_gradients_that_push_further() -> None:
    output, gradient = run(GrpoConfig(eps_clip=0.2), view([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0]))
    torch.testing.assert_close(output.loss, torch.tensor([-1.2, -0.5, 1.5, 0.8], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.5, 1.5, 0.0], dtype=torch.float64))
    assert output.means["pg_clipfrac"].tolist() == [1, 0, 0, 1]


def test_eps_clip_high_widens_only_the_upper_side() -> None:
    output, _ = run(GrpoConfig(eps_clip=0.2, eps_clip_high=0.6), view([1.5, 0.5], [1.0, -1.0]))
    torch.testing.assert_close(output.loss, torch.tensor([-1.5, 0.8], dtype=torch.float64))


def test_without_old_scores_the_gradient_is_the_policy_gradient() -> None:
    tokens = replace(view([0.5, 0.25], [2.0, -1.0]), old_logprobs=None)
    output, gradient = run(GrpoConfig(), tokens)
    assert output.loss.tolist() == [-2.0, 1.0]
    assert gradient.tolist() == [-2.0, 1.0]
    assert output.means["ppo_kl"].tolist() == [0.0, 0.0]


def test_ratios_are_bounded_at_a_log_ratio_of_20() -> None:
    """Extreme ratios of policy to old policy, and of old policy to rollout policy, keep the loss finite."""
    distant = replace(view([1.0, 1.0], [-1.0, -1.0]), old_logprobs=torch.tensor([-30.0, 30.0], dtype=torch.float64))
    output, _ = run(GrpoConfig(), distant)
    assert output.means["ois"].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert output.loss.tolist() == pytest.approx([math.exp(20), 0.8])
    distant_rollout = replace(
        view([1.0, 1.0], [1.0, 1.0]), rollout_logprobs=torch.tensor([-30.0, 30.0], dtype=torch.float64)
    )
    output, _ = run(GrpoConfig(use_tis=True), distant_rollout)
    assert output.means["tis"].tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_tis_weights_are_truncated_and_carry_no_gradient() -> None:
    tokens = replace(
        view([1.0, 1.0], [1.0, 1.0]), rollout_logprobs=torch.tensor([0.5, 10.0], dtype=torch.float64).log()
    )
    output, gradient = run(GrpoConfig(use_tis=True, tis_clip=1.5), tokens)
    torch.testing.assert_close(output.means["tis"], torch.tensor([2.0, 0.1], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-1.5, -0.1], dtype=torch.float64))
    assert output.means["tis_clipfrac"].tolist() == [1, 0]


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    output, gradient = run(GrpoConfig(eps_clip_c=3.0), view([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0]))
    torch.testing.assert_close(output.loss, torch.tensor([3.0, 2.0, -1.2], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    assert output.means["pg_clipfrac_lower"].tolist() == [1, 0, 0]


def in_sequences(tokens: LossView, index: list[int]) -> LossView:
    sequences = PackedSequences(
        index_N=torch.tensor(index),
        num_trained_S=torch.bincount(torch.tensor(index)).double(),
        reduce=LocalReduce(),
    )
    return replace(tokens, sequences=sequences)


def test_gspo_shares_one_ratio_and_its_gradient_per_sequence() -> None:
    tokens = in_sequences(view([4.0, 1.0, 0.5], [1.0, 1.0, -1.0]), [0, 0, 1])
    output, gradient = run(GspoConfig(eps_clip=0.2, eps_clip_high=2.0), tokens)
    torch.testing.assert_close(output.loss, torch.tensor([-2.0, -2.0, 0.8], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -2.0, 0.0], dtype=torch.float64))  # (2 + 2) / 2 each
    torch.testing.assert_close(output.maxima["seq_ratio_max"], torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64))


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    output, gradient = run(CispoConfig(eps_clip=0.5, eps_clip_high=1.0), view([4.0, 0.1, 1.0], [1.0, -1.0, 2.0]))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.5, -2.0], dtype=torch.float64))
    assert output.means["pg_clipfrac"].tolist() == [1, 1, 0]


def test_rejected_sequences_lose_every_term_of_the_loss() -> None:
    tokens = in_sequences(replace(view([1.0, 1.0], [1.0, 1.0]), entropy=torch.ones(2, dtype=torch.float64)), [0, 1])
    tokens = replace(tokens, rollout_logprobs=torch.tensor([0.0, -3.0], dtype=torch.float64))
    config = GrpoConfig(rejection="product", rejection_high=2.0, kl_loss_coef=0.1, entropy_coef=0.1)
    output, gradient = run(config, tokens)
    assert float(output.loss[0].detach()) == pytest.approx(-1.1)
    assert (float(output.loss[1].detach()), float(gradient[1])) == (0.0, 0.0)


def test_entropy_is_required_only_with_a_coefficient() -> None:
    assert not policy_gradient(GrpoConfig()).needs_entropy
    for loss_fn in (
        policy_gradient(GrpoConfig(entropy_coef=0.01)),
        gspo(GspoConfig(entropy_coef=0.01)),
        cispo(CispoConfig(entropy_coef=0.01)),
    ):
        assert loss_fn.needs_entropy
    assert not sft(SftConfig()).needs_entropy


@pytest.mark.parametrize("old", [None, -1e5])
@pytest.mark.parametrize("schema", [GrpoConfig, GspoConfig, CispoConfig])
def test_untrained_tokens_stay_finite_for_distant_policies(schema: type[PolicyConfig], old: float | None) -> None:
    """Padding and prompts may have any value, and 0 * inf would be nan."""
    column = torch.full((3,), -1e5)
    tokens = LossView(
        logprobs=torch.tensor([0.0, -1e5, -3.0], requires_grad=True),
        entropy=torch.zeros(3),
        loss_weight=torch.zeros(3),
        advantages=torch.tensor([1.0, -1.0, 0.0]),
        old_logprobs=None if old is None else column,
        rollout_logprobs=torch.zeros(3),
        ref_logprobs=column,
    )
    config = schema(use_mis=True, kl_loss_coef=0.1, entropy_coef=0.1, rejection="product", rejection_low=0.5)
    output, gradient = run(config, in_sequences(tokens, [0, 0, 1]))
    assert output.loss.isfinite().all() and gradient.isfinite().all()


def test_metric_names_are_slimes() -> None:
    tokens = replace(view([1.0], [1.0]), entropy=torch.zeros(1, dtype=torch.float64))
    output, _ = run(GrpoConfig(use_tis=True, kl_loss_coef=0.1, entropy_coef=0.1), tokens)
    assert set(output.means) == {
        "pg_loss", "pg_clipfrac", "ppo_kl", "ois", "kl_loss", "entropy_loss", "tis", "tis_abs", "tis_clipfrac",
    }  # fmt: skip
    assert not any(value.requires_grad for value in output.means.values())


def test_every_metric_of_a_loss_is_in_the_dictionary() -> None:
    tokens = in_sequences(replace(view([1.0], [-1.0]), entropy=torch.zeros(1, dtype=torch.float64)), [0])
    options: dict[str, Any] = {
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.1,
        "rejection": "product",
        "rejection_low": 0.5,
    }
    for config in (
        GrpoConfig(use_tis=True, eps_clip_c=2.0, **options),
        GspoConfig(use_mis=True, **options),
        CispoConfig(**options),
        SftConfig(),
    ):
        output: LossOutput = resolve("algo.loss", config.loss, LOSSES)(config)(tokens)
        assert unknown_names(f"train/{name}" for name in [*output.means, *output.maxima]) == []


@pytest.mark.parametrize("name", LOSSES)
def test_the_rules_know_the_schema_that_a_loss_reads(name: str) -> None:
    loss = resolve("algo.loss", name, LOSSES)
    hints = get_type_hints(loss.__init__ if isinstance(loss, type) else loss)
    config_type = next(hint for parameter, hint in hints.items() if parameter != "return")
    assert config_type is LOSS_SCHEMAS.get(name, AlgoConfig)
