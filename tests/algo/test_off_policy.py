"""Truncated and masked importance sampling, and rejection of sequences."""

from __future__ import annotations

import pytest
import torch

from slime_like.algo.off_policy import correction, masked_importance, sequence_ratio, truncated_importance
from slime_like.algo.sequences import PackedSequences
from slime_like.config.schema.algo import GrpoConfig
from tests.algo.simulate import LocalReduce


def test_weights_are_ratios_up_to_the_clip_and_carry_no_gradient() -> None:
    old = torch.tensor([0.5, 0.5, 0.1]).log().requires_grad_()
    found = truncated_importance(old, torch.tensor([0.25, 0.05, 0.2]).log(), clip=3.0)
    torch.testing.assert_close(found.weight, torch.tensor([2.0, 3.0, 0.5]))
    torch.testing.assert_close(found.raw, torch.tensor([2.0, 10.0, 0.5]))
    assert not found.weight.requires_grad and not found.raw.requires_grad


def test_impossible_ratios_stay_finite() -> None:
    found = truncated_importance(torch.tensor([0.0, -1e5]), torch.tensor([-1e5, 0.0]), clip=2.0)
    assert found.raw.isfinite().all()
    assert found.weight.tolist()[0] == 2.0


def test_the_lower_bound_of_tis_lifts_small_weights() -> None:
    found = truncated_importance(torch.tensor([0.1]).log(), torch.tensor([0.5]).log(), clip=2.0, low=0.5)
    torch.testing.assert_close(found.weight, torch.tensor([0.5]))


def test_masked_weights_are_ratios_inside_the_range_and_0_outside() -> None:
    old = torch.tensor([0.4, 0.5, 0.1, 0.3]).log().requires_grad_()
    found = masked_importance(old, torch.tensor([0.2, 0.05, 0.5, 0.3]).log(), low=0.5, high=5.0)
    torch.testing.assert_close(found.weight, torch.tensor([2.0, 0.0, 0.0, 1.0]))
    assert not found.weight.requires_grad


def three_sequences() -> tuple[torch.Tensor, torch.Tensor, PackedSequences]:
    """Log-ratios 0.2 and 0.4 | 3.0 | 1.0 at a token that is not trained."""
    sequences = PackedSequences(
        index=torch.tensor([0, 0, 1, 2]),
        trained=torch.tensor([True, True, True, False]),
        num_trained=torch.tensor([2.0, 1.0, 0.0]),
        reduce=LocalReduce(),
    )
    return torch.tensor([0.2, 0.4, 3.0, 1.0]), torch.zeros(4), sequences


@pytest.mark.parametrize(("geometric", "expected"), [(False, [0.6, 0.6, 3.0, 0.0]), (True, [0.3, 0.3, 3.0, 0.0])])
def test_a_sequence_has_one_ratio(geometric: bool, expected: list[float]) -> None:
    old, rollout, sequences = three_sequences()
    torch.testing.assert_close(
        sequence_ratio(old, rollout, sequences, geometric=geometric), torch.tensor(expected).exp()
    )


def test_a_rejected_sequence_is_dropped_whole_and_counted() -> None:
    old, rollout, sequences = three_sequences()
    found = correction(GrpoConfig(rejection="geometric", rejection_high=2.0), old, rollout, sequences)
    assert found.keep is not None and found.weight is None
    assert found.keep.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert found.means["rejection_frac"].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_masked_fractions_say_on_which_side() -> None:
    old, rollout, _ = three_sequences()
    found = correction(GrpoConfig(use_mis=True, mis_high=1.3, mis_low=0.5), old, rollout, None)
    assert found.means["mis_maskfrac_high"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert found.means["mis_maskfrac_low"].tolist() == [0.0] * 4
