"""pass@k: probability that at least one of k samples is correct, estimated from n >= k samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)``, as a product that does not overflow.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1. Example: ``pass_at_k(4, 1, 2) == 0.5``.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    num_wrong = num_samples - num_right
    if num_wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_wrong + 1, num_samples + 1)))


def mean_pass_at_k(right: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return k -> mean over the prompts of pass@k, for each power of two up to the smallest number of samples per prompt.

    Empty if a prompt has one sample: pass@1 is the accuracy. ``right[p][i]``: sample i of prompt p is correct.
    """
    min_samples = min((len(samples) for samples in right), default=0)
    if min_samples < 2:
        return {}
    ks = [2**i for i in range(min_samples.bit_length())]
    return {k: float(np.mean([pass_at_k(len(samples), sum(samples), k) for samples in right])) for k in ks}
