"""Per-token arrays of samples, built from spans without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.batch import PackedBatch
from slime_like.errors import EngineError
from slime_like.types import F32, I32, Reward, Sample, Source, Span, Status

UNTRAINED = (Status.FAILED, Status.ABORTED)  # no weight for their tokens, not in a baseline
FILLER_ID = -1  # sample_id of a sequence that only keeps a rank busy


@dataclass(frozen=True, slots=True)
class SequenceColumns:
    """Columns of one sequence of L tokens, ready for packing."""

    sample: Sample
    advantage: float | None
    trained: npt.NDArray[np.bool_]  # [L], tokens in the loss
    versions: I32  # [L]
    rollout_logprobs: F32  # [L]
    num_trained: int

    @property
    def episode(self) -> tuple[int, int]:
        """Return the key of the episode, the unit of means over sequences."""
        return self.sample.group_id, self.sample.episode_id


def column(
    sample: Sample, advantage: float | None, masked: frozenset[Status] = frozenset(), newest: bool = False
) -> SequenceColumns:
    """Return the per-token arrays of a sample; a status in ``masked`` is not trained on; with ``newest``, only the tokens
    of its newest weight version are. Raises ``EngineError`` if a sampled token has no log-probability.
    """
    lengths = [span.stop - span.start for span in sample.spans]
    sampled = np.repeat([span.source is Source.MODEL for span in sample.spans], lengths)
    versions = np.repeat([span.version if span.source is Source.MODEL else -1 for span in sample.spans], lengths)
    trained = sampled & (sample.status not in (*UNTRAINED, *masked))
    if newest:
        trained &= versions == versions.max(initial=-1)
    trained[:1] = False  # no token precedes the first one, so nothing predicts it
    unknown = int(np.isnan(sample.logprobs[trained]).sum())
    if unknown:
        raise EngineError(
            f"sample {sample.sample_id} of group {sample.group_id}: {unknown} of its {int(trained.sum())} sampled "
            f"tokens have no log-probability; a generate function must keep the engine's at every Source.MODEL token"
        )
    logprobs = np.where(sampled, np.nan_to_num(sample.logprobs, nan=0.0), 0.0).astype(np.float32)
    return SequenceColumns(sample, advantage, trained, versions.astype(np.int32), logprobs, int(trained.sum()))


def filler(shortest: SequenceColumns) -> SequenceColumns:
    """Return a sequence of at most two tokens with weight 0, for a rank with fewer sequences than micro-batches."""
    length = min(2, len(shortest.sample.token_ids))
    sample = replace(
        shortest.sample,
        sample_id=FILLER_ID,
        token_ids=shortest.sample.token_ids[:length],
        logprobs=np.zeros(length, dtype=np.float32),
        spans=(Span(0, length, Source.PROMPT),),
        reward=Reward(0.0),
        extras={name: value[:length] for name, value in shortest.sample.extras.items()},
    )
    return column(sample, None if shortest.advantage is None else 0.0)


def rows_of(columns: Sequence[SequenceColumns], token_weights: Sequence[float]) -> PackedBatch:
    """Return one packed micro-batch; ``token_weights[i]`` is the weight of the trained tokens of sequence i."""
    samples = [c.sample for c in columns]
    lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
    trained = np.concatenate([c.trained for c in columns])
    weights = np.repeat(np.array(token_weights, dtype=np.float32), lengths)
    advantages = [c.advantage for c in columns if c.advantage is not None]
    return PackedBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]).astype(np.int32, copy=False),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.where(trained, weights, np.float32(0.0)),
        versions=np.concatenate([c.versions for c in columns]),
        rollout_logprobs=np.concatenate([c.rollout_logprobs for c in columns]),
        rewards=np.array([s.reward.score if s.reward is not None else 0.0 for s in samples], dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32) if advantages else None,
        sample_ids=np.array([s.sample_id for s in samples], dtype=np.int64),
        extras=_extras(samples),
    )


def _extras(samples: Sequence[Sample]) -> dict[str, npt.NDArray[Any]]:
    """Per-token extras of all sequences, one after another. All sequences must carry the same ones."""
    names = set(samples[0].extras)
    for sample in samples:
        if set(sample.extras) != names:
            raise EngineError(
                f"samples {samples[0].sample_id} and {sample.sample_id} carry different extras: "
                f"{sorted(names)} and {sorted(sample.extras)}; a generate function must give every sample the same ones"
            )
        for name, value in sample.extras.items():
            if len(value) != len(sample.token_ids):
                raise EngineError(
                    f"sample {sample.sample_id}: extras[{name!r}] has {len(value)} entries for {len(sample.token_ids)} "
                    f"tokens; extras are columns beside the tokens"
                )
    return {name: np.concatenate([s.extras[name] for s in samples]) for name in sorted(names)}
