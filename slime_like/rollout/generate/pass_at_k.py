"""pass@k: the chance that at least one of k samples is right, estimated from n >= k samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate ``1 - C(n - c, k) / C(n, k)``, as a product that does not overflow.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1. Example: ``pass_at_k(4, 1, 2) == 0.5``.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    wrong = num_samples - num_right
    if wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(wrong + 1, num_samples + 1)))


def mean_pass_at_k(right: Sequence[Sequence[bool]]) -> dict[int, float]:
    """k -> mean over the prompts of pass@k, for every power of two up to the samples that each prompt has.

    Empty where a prompt has one sample: that is the accuracy. ``right[p][i]``: is sample i of prompt p right?
    """
    fewest = min((len(samples) for samples in right), default=0)
    if fewest < 2:
        return {}
    ks = [2**i for i in range(fewest.bit_length())]
    return {k: float(np.mean([pass_at_k(len(samples), sum(samples), k) for samples in right])) for k in ks}
