"""Estimate of response lengths from finished and running requests, and of the KV cache that running requests will need.

Running requests are right-censored observations: their length is at least the number of tokens generated so far.
Ignoring them would underestimate the lengths, because short responses finish first. Estimator: product limit, Kaplan and
Meier 1958, "Nonparametric Estimation from Incomplete Observations".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
NUM_ENDLESS = 8  # assumed responses without an end, added to the observed ones
NUM_INTERVALS = 32  # intervals of future steps for which the tokens in use are bounded
DEVIATIONS = 3.0  # standard deviations above the mean that a reservation covers


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Distribution of response lengths: ``share_K[k]`` is the share of responses that are longer than k tokens.

    The last entry also applies to all greater k.
    """

    share_K: F64  # descending, above 0

    @classmethod
    def estimate(cls, lengths_N: I64, ended_N: NDArray[np.bool_]) -> ResponseLengths:
        """Return the estimate from observed ``lengths_N``, which are lower bounds where ``ended_N`` is False.

        ``NUM_ENDLESS`` responses that never end are added, so that a few short responses have little weight. Therefore a
        response longer than all observed ones is expected to reach its maximum length; so is any response if none was observed.
        """
        num_K = np.bincount(lengths_N, minlength=1)
        num_ended_K = np.bincount(lengths_N[ended_N], minlength=len(num_K))
        at_risk_K = NUM_ENDLESS + np.cumsum(num_K[::-1])[::-1]
        return cls(np.cumprod(1 - num_ended_K / at_risk_K, dtype=np.float64))

    def reservation(self, generated_S: I64, maximum_S: I64) -> int:
        """Return the number of tokens to keep free for unfinished responses that have ``generated_S`` tokens.

        Responses decode one token per step and end at ``maximum_S`` at the latest. The result is the peak number of
        tokens over all future steps, minus the tokens generated so far. The number at a step is the mean plus
        ``DEVIATIONS`` standard deviations, but no more than if every response reached ``maximum_S``. Steps are grouped
        into intervals. A response that is unfinished at the start of an interval counts with its length at the interval's end.
        """
        remaining_S = np.maximum(0, maximum_S - generated_S)
        horizon = int(remaining_S.max(initial=0))
        if not horizon:
            return 0
        edges_T = np.linspace(0, horizon, min(horizon, NUM_INTERVALS) + 1).round().astype(np.int64)
        share_ST = self._share(generated_S[:, None] + edges_T[:-1]) / self._share(generated_S)[:, None]
        share_ST *= edges_T[:-1] < remaining_S[:, None]
        held_ST = np.minimum(generated_S[:, None] + edges_T[1:], maximum_S[:, None])
        mean_T = (share_ST * held_ST).sum(0)
        variance_T = (share_ST * (1 - share_ST) * held_ST**2).sum(0)
        worst_T = (held_ST * (share_ST > 0)).sum(0)
        needed_T = np.minimum(worst_T, mean_T + DEVIATIONS * np.sqrt(variance_T))
        return max(0, math.ceil(needed_T.max()) - int(generated_S.sum()))

    def _share(self, tokens: I64) -> F64:
        return self.share_K[np.minimum(tokens, len(self.share_K) - 1)]
