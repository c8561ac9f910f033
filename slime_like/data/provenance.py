"""Provenance of sampled tokens: masks of tokens whose engine and trainer log-probabilities should be equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_like.batch import PackedBatch

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Three disjoint masks [T] that cover every sampled token of a row.

    Example, trainer at version 7: every token of a sample has version 7: ``own``. A sample begun under version 6 and
    continued under 7: its first tokens are ``stale``, its others ``mixed``.
    """

    own: Mask  # in samples that the trainer's version sampled completely: equal to the trainer's up to rounding
    mixed: Mask  # sampled by the trainer's version, in samples that another version began
    stale: Mask  # sampled by another version: off-policy by design

    @property
    def sampled(self) -> Mask:
        """[T] every token that an engine sampled."""
        return self.own | self.mixed | self.stale


def provenance(rows: PackedBatch, version: int) -> Provenance:
    """Classify the sampled tokens of ``rows`` for a trainer with weights of ``version``.

    Only this function decides which samples the gate checks: a sample whose ``rollout_logprobs`` come from a distribution
    other than the trainer's must not be in ``own``.
    """
    sampled = rows.versions >= 0
    stale = sampled & (rows.versions != version)
    sequence = np.repeat(np.arange(len(rows.cu_seqlens) - 1), np.diff(rows.cu_seqlens))
    in_stale_sample = np.isin(sequence, sequence[stale])
    return Provenance(own=sampled & ~in_stale_sample, mixed=sampled & in_stale_sample & ~stale, stale=stale)
