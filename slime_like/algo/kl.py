"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens (table KL_ESTIMATORS).

Source: J. Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # of importance ratios: exp(20) = 5e8 is finite in every dtype in use
MAX_KL_LOG_RATIO = 80.0  # exp(80) = 6e34 is finite in float32; infinity times a loss weight of 0 would be nan
MAX_LOW_VAR_KL = 10.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q``: unbiased, high variance, negative for single tokens. [T], [T] -> [T]."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)² / 2``: biased, low variance, never negative. [T], [T] -> [T]."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased, low variance, never negative. [T], [T] -> [T].

    It grows with ``q/p``, and its gradient with it: a token that the policy all but forgot outweighs a whole batch.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_KL_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 clamped to at most 10, with a gradient of 0 beyond. [T], [T] -> [T].

    The maths of ``low_var_kl`` in slime (``slime/utils/ppo_utils.py``) and in verl (``verl/trainer/ppo/core_algos.py``,
    where ``k3`` names the same).
    """
    return k3(logprobs, ref_logprobs).clamp(max=MAX_LOW_VAR_KL)
