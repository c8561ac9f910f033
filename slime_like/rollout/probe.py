"""The gate after each push: engine and trainer score the same sequences and must agree.

Works at any staleness, since it compares the weights both hold now, and catches a push that did not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.batch import Rows
from slime_like.errors import ConsistencyError
from slime_like.metrics.types import Max, Mean, Metric
from slime_like.types import F32, I32


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """What the engine thinks of S sequences under one weight version."""

    version: int
    token_ids: tuple[I32, ...]  # S x [L]
    logprobs: tuple[F32, ...]  # S x [L - 1], of tokens 1 .. L - 1


def to_rows(scores: ProbeScores) -> Rows:
    """The probe's sequences as one packed row for the trainer."""
    lengths = [len(ids) for ids in scores.token_ids]
    total, count = sum(lengths), len(lengths)
    return Rows(
        token_ids=np.concatenate(scores.token_ids).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.ones(total, dtype=np.float32),
        versions=np.full(total, scores.version, dtype=np.int32),
        rollout_logprobs=np.zeros(total, dtype=np.float32),
        rewards=np.zeros(count, dtype=np.float32),
        advantages=None,
        sample_ids=np.arange(count, dtype=np.int64),
    )


def check(scores: ProbeScores, trainer_logprobs_T: F32, version: int, tolerance: float) -> tuple[Metric, ...]:
    """Metrics ``probe/*``. Raises ``ConsistencyError`` when any log-probability differs by more than ``tolerance``."""
    if scores.version != version:
        raise ConsistencyError(
            f"an engine serves weights of version {scores.version} after the push of version {version}"
        )
    difference = differences(scores, trainer_logprobs_T)
    worst = float(difference.max()) if np.isfinite(difference).all() else float("inf")
    if not worst <= tolerance:
        raise ConsistencyError(
            f"after the push of version {version} engine and trainer disagree: largest |log-probability difference| {worst:.3g} "
            f"over {difference.size} tokens of {len(scores.token_ids)} sequences, weights.probe_tolerance is {tolerance:g}. "
            "The engine holds other weights than the trainer, or computes another distribution from them; no step was trained on it"
        )
    return Max("probe/logprob_abs_diff_max", worst), Mean("probe/logprob_abs_diff_mean", float(difference.mean()))


def by_kind(scores: ProbeScores, trainer_logprobs_T: F32, kind: str) -> tuple[Metric, ...]:
    """Metrics ``probe/logprob_abs_diff_*/<kind>``: the differences left when layers of ``kind`` are exact in the trainer."""
    difference = differences(scores, trainer_logprobs_T)
    return (
        Max(f"probe/logprob_abs_diff_max/{kind}", float(difference.max())),
        Mean(f"probe/logprob_abs_diff_mean/{kind}", float(difference.mean())),
    )


def differences(scores: ProbeScores, trainer_logprobs_T: F32) -> F32:
    """|trainer - engine| of every token but first ones."""
    return np.abs(trainer_columns(scores.token_ids, trainer_logprobs_T) - np.concatenate(scores.logprobs))


def trainer_columns(token_ids: Sequence[I32], logprobs_T: F32) -> F32:
    """The trainer's packed [T] column without each sequence's first token."""
    keep = np.ones(len(logprobs_T), dtype=bool)
    keep[np.concatenate([[0], np.cumsum([len(ids) for ids in token_ids])])[:-1]] = False
    return logprobs_T[keep]
