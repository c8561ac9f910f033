"""Truncated importance sampling."""

from __future__ import annotations

import torch

from slime_like.algo.off_policy import truncated_importance


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
