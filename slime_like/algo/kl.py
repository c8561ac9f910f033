"""Per-token estimators of KL(p || q), p = policy and q = reference, at tokens sampled from p (table KL_ESTIMATORS).

Source: J. Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. Axis: T = tokens.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # limit for importance ratios: exp(20) = 5e8 is finite in bfloat16 and float32
MAX_KL_LOG_RATIO = 80.0  # exp(80) = 6e34 is finite in float32; infinity times a loss weight of 0 would be nan
MAX_LOW_VAR_KL = 10.0


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``log p - log q``: unbiased, high variance, negative for some tokens."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``(log p - log q)² / 2``: biased, low variance, never negative."""
    return (logprobs_T - ref_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``q/p - 1 - log(q/p)``: unbiased, low variance, never negative.

    Value and gradient grow with ``q/p``: one token that the policy has made improbable can outweigh a batch.
    """
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(max=MAX_KL_LOG_RATIO)
    return log_ratio_T.expm1() - log_ratio_T


def low_var_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return k3 clamped to at most 10, with zero gradient above.

    Source: ``low_var_kl`` in slime (``slime/utils/ppo_utils.py``) and in verl (``verl/trainer/ppo/core_algos.py``,
    where it is also called ``k3``).
    """
    return k3(logprobs_T, ref_logprobs_T).clamp(max=MAX_LOW_VAR_KL)
