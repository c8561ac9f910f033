"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens (table KL_ESTIMATORS).

Source of all three: J. Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is finite in every dtype in use; beyond it the estimate means nothing


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q``: unbiased, high variance, negative for single tokens. [T], [T] -> [T]."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)² / 2``: biased, low variance, never negative. [T], [T] -> [T]."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased, low variance, never negative; slime's ``low_var_kl``. [T], [T] -> [T].

    The log-ratio is clamped to ±20, so that one token that the policy all but forgot cannot make the loss infinite.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio
