"""KL estimators."""

from __future__ import annotations

import pytest
import torch

from slime_like.algo.kl import k1, k2, k3
from slime_like.config.names import KL_ESTIMATORS
from slime_like.registry import resolve

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_k1_and_k3_are_unbiased() -> None:
    exact = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * k1(P.log(), Q.log())).sum(), exact)
    torch.testing.assert_close((P * k3(P.log(), Q.log())).sum(), exact)


def test_gradient_of_k2_is_the_gradient_of_the_kl() -> None:
    logits = torch.tensor([0.1, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - Q.log())).sum(), logits, retain_graph=True)[0]
    found = torch.autograd.grad((logprobs.detach().exp() * k2(logprobs, Q.log())).sum(), logits)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equal_policies_have_no_kl_and_far_ones_a_finite_one(name: str) -> None:
    estimator = resolve("algo.kl_loss_type", name, KL_ESTIMATORS)
    logprobs = torch.tensor([-1.0, -1e4, -0.5, 0.0], requires_grad=True)
    found = estimator(logprobs, torch.tensor([-1.0, -0.1, -1e4, -1e30]))
    assert found[0] == 0
    found[:3].sum().backward()
    assert logprobs.grad is not None and logprobs.grad[:3].isfinite().all()


def test_k3_never_is_negative() -> None:
    difference = torch.linspace(-0.01, 0.01, 2001)
    assert (k3(difference, torch.zeros(())) >= 0).all()
    assert (k2(difference, torch.zeros(())) >= 0).all()
