"""KL estimators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from slime_like.algo.loss import k1, k2, k3, low_var_kl
from slime_like.config.schema.names import KL_ESTIMATORS
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
    estimate = torch.autograd.grad((logprobs.detach().exp() * k2(logprobs, Q.log())).sum(), logits)[0]
    torch.testing.assert_close(estimate, expected)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_is_zero_for_equal_and_finite_for_distant_policies(name: str) -> None:
    estimator = resolve("algo.kl_loss_type", name, KL_ESTIMATORS)
    logprobs = torch.tensor([-1.0, -1e4, -0.5, 0.0], requires_grad=True)
    estimate = estimator(logprobs, torch.tensor([-1.0, -0.1, -1e4, -1e30]))
    assert estimate[0] == 0
    estimate[:3].sum().backward()
    assert logprobs.grad is not None and logprobs.grad[:3].isfinite().all()


def test_k2_and_k3_are_never_negative() -> None:
    difference = torch.linspace(-0.01, 0.01, 2001)
    assert (k3(difference, torch.zeros(())) >= 0).all()
    assert (k2(difference, torch.zeros(())) >= 0).all()


def plain_k3(log_ratio: float) -> tuple[float, float]:
    """Return k3 at ``log q - log p`` and its derivative by ``log p``, in Python floats."""
    return math.exp(log_ratio) - 1 - log_ratio, 1 - math.exp(log_ratio)


def plain_low_var_kl(log_ratio: float) -> tuple[float, float]:
    """Return value and derivative of slime's and verl's ``low_var_kl``: k3 clamped to ±10, constant beyond."""
    value, slope = plain_k3(log_ratio)
    return (value, slope) if abs(value) <= 10 else (10.0, 0.0)


@pytest.mark.parametrize(
    ("name", "definition", "log_ratio_bound"),
    [("k3", plain_k3, 70.0), ("low_var_kl", plain_low_var_kl, 1e6)],
    ids=["k3", "low_var_kl"],
)
def test_value_and_gradient_match_the_definition(
    name: str, definition: Callable[[float], tuple[float, float]], log_ratio_bound: float
) -> None:
    estimator = resolve("algo.kl_loss_type", name, KL_ESTIMATORS)
    inside = torch.linspace(-14, 4, 3601, dtype=torch.float64)
    outside = torch.tensor(
        [5.0, 20.0, 20.5, -19.5, -20.5, 60.0, -60.0, log_ratio_bound, -log_ratio_bound], dtype=torch.float64
    )
    log_ratios = torch.cat([inside, outside])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logprobs = (-log_ratios).to(dtype).requires_grad_()
        estimate = estimator(logprobs, torch.zeros((), dtype=dtype))
        (slopes,) = torch.autograd.grad(estimate.sum(), logprobs)
        expected = [definition(min(x, 700.0)) for x in log_ratios.tolist()]
        values, gradients = (torch.tensor(column, dtype=dtype) for column in zip(*expected, strict=True))
        torch.testing.assert_close(estimate, values, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(slopes, gradients, rtol=tolerance, atol=tolerance)


def test_low_var_kl_is_clamped_at_a_log_ratio_of_five() -> None:
    """slime and verl give value 10 and gradient 0; k3 gives 142 and -147."""
    logprobs = torch.tensor([-5.0, -5.0], requires_grad=True)
    kinds = torch.stack([low_var_kl(logprobs, torch.zeros(2))[0], k3(logprobs, torch.zeros(2))[1]])
    (slopes,) = torch.autograd.grad(kinds.sum(), logprobs)
    assert kinds.tolist() == [10.0, pytest.approx(math.exp(5) - 6)]
    assert slopes.tolist() == [0.0, pytest.approx(1 - math.exp(5))]
