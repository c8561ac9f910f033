"""Provenance of sampled tokens, which tells for each token whether engine and trainer log-probabilities should agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_like.batch import PackedBatch

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Three disjoint masks [T] that cover every sampled token of a micro-batch.

    Example, with the trainer at version 7: a sample whose tokens all have version 7 is ``on_policy``. A sample that
    version 6 began and version 7 continued has ``stale`` tokens first and ``mixed`` tokens after them.
    """

    on_policy: Mask  # in samples that only the trainer's version sampled: engine and trainer agree up to rounding
    mixed: Mask  # sampled by the trainer's version, in samples that another version began
    stale: Mask  # sampled by another version

    @property
    def sampled(self) -> Mask:
        """Return a mask [T] that is True for every token that an engine sampled."""
        return self.on_policy | self.mixed | self.stale


def provenance(batch: PackedBatch, version: int) -> Provenance:
    """Classify the sampled tokens of ``batch`` for a trainer with weights of ``version``.

    ``train.megatron.step.sample_difference`` applies ``weights.sample_tolerance`` to the ``on_policy`` tokens only, so
    these must not include tokens whose ``rollout_logprobs`` come from a distribution other than the trainer's.
    """
    sampled = batch.versions >= 0
    stale = sampled & (batch.versions != version)
    sequence = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
    in_stale_sample = np.isin(sequence, sequence[stale])
    return Provenance(on_policy=sampled & ~in_stale_sample, mixed=sampled & in_stale_sample & ~stale, stale=stale)
