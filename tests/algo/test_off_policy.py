"""Off-policy corrections: truncated and masked importance sampling, and rejection of sequences."""

from __future__ import annotations

import pytest
import torch

from slime_like.algo.loss import PackedSequences
from slime_like.algo.off_policy import importance_correction, masked_importance, sequence_ratio, truncated_importance
from slime_like.config.schema.algo import GrpoConfig
from tests.algo.simulate import LocalReduce


def test_weights_are_ratios_up_to_the_clip_and_carry_no_gradient() -> None:
    old = torch.tensor([0.5, 0.5, 0.1]).log().requires_grad_()
    result = truncated_importance(old, torch.tensor([0.25, 0.05, 0.2]).log(), clip=3.0)
    torch.testing.assert_close(result.weight_T, torch.tensor([2.0, 3.0, 0.5]))
    torch.testing.assert_close(result.raw_T, torch.tensor([2.0, 10.0, 0.5]))
    assert not result.weight_T.requires_grad and not result.raw_T.requires_grad


def test_impossible_ratios_stay_finite() -> None:
    result = truncated_importance(torch.tensor([0.0, -1e5]), torch.tensor([-1e5, 0.0]), clip=2.0)
    assert result.raw_T.isfinite().all()
    assert result.weight_T.tolist()[0] == 2.0


def test_the_lower_bound_of_tis_lifts_small_weights() -> None:
    result = truncated_importance(torch.tensor([0.1]).log(), torch.tensor([0.5]).log(), clip=2.0, low=0.5)
    torch.testing.assert_close(result.weight_T, torch.tensor([0.5]))


def test_masked_weights_are_ratios_inside_the_range_and_0_outside() -> None:
    old = torch.tensor([0.4, 0.5, 0.1, 0.3]).log().requires_grad_()
    result = masked_importance(old, torch.tensor([0.2, 0.05, 0.5, 0.3]).log(), low=0.5, high=5.0)
    torch.testing.assert_close(result.weight_T, torch.tensor([2.0, 0.0, 0.0, 1.0]))
    assert not result.weight_T.requires_grad


def three_sequences() -> tuple[torch.Tensor, torch.Tensor, PackedSequences]:
    """Return log-probabilities with log-ratios 0.2, 0.4 | 3.0 | no trained token, and their sequences."""
    sequences = PackedSequences(
        index_N=torch.tensor([0, 0, 1]),
        num_trained_S=torch.tensor([2.0, 1.0, 0.0]),
        reduce=LocalReduce(),
    )
    return torch.tensor([0.2, 0.4, 3.0]), torch.zeros(3), sequences


@pytest.mark.parametrize(("geometric", "expected"), [(False, [0.6, 0.6, 3.0]), (True, [0.3, 0.3, 3.0])])
def test_a_sequence_has_one_ratio(geometric: bool, expected: list[float]) -> None:
    old, rollout, sequences = three_sequences()
    torch.testing.assert_close(
        sequence_ratio(old, rollout, sequences, geometric=geometric), torch.tensor(expected).exp()
    )


def test_a_rejected_sequence_is_dropped_and_counted() -> None:
    old, rollout, sequences = three_sequences()
    result = importance_correction(GrpoConfig(rejection="geometric", rejection_high=2.0), old, rollout, sequences)
    assert result.keep is not None and result.weight is None
    assert result.keep.tolist() == [1.0, 1.0, 0.0]
    assert result.means["rejection_frac"].tolist() == [0.0, 0.0, 1.0]


def test_masked_fractions_are_reported_per_side() -> None:
    old, rollout, _ = three_sequences()
    result = importance_correction(GrpoConfig(use_mis=True, mis_high=1.3, mis_low=0.5), old, rollout, None)
    assert result.means["mis_maskfrac_high"].tolist() == [0.0, 1.0, 1.0]
    assert result.means["mis_maskfrac_low"].tolist() == [0.0] * 3
