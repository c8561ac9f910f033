"""Trainer ranks that score sequences under ``run.deterministic=true``, for comparison with an engine's bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slime_like.config.schema.resolved import Layout
from slime_like.rollout.pool.probe import ScoredSequence, to_rows
from slime_like.types import F32, I32
from tests.train.jobs import make_actor
from tests.train.ranks import RankWorld

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.trainer import RankTrainer


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """Sequences to score with one model at one temperature."""

    model: Path
    temperature: float
    sequences: tuple[I32, ...]


def answer(world: RankWorld, layout: Layout, queries: Sequence[ScoreQuery]) -> list[list[F32]]:
    """Return [L - 1] log-probabilities per query and sequence on the reporter rank, and nothing on the others."""
    answers: list[list[F32]] = []
    for query in queries:
        actor = make_actor(world, query.model, layout, temperature=query.temperature, deterministic=True)
        scores = _score(actor, query.sequences)
        for i, sequence in enumerate(query.sequences[:3]):
            for single_scores in _score(actor, [sequence]):
                assert np.array_equal(single_scores, scores[i]), "a sequence's scores depend on what it is packed with"
        answers += [scores] if actor.rank_info.is_reporter else []
    return answers


def both_layouts(world: RankWorld, query: ScoreQuery) -> list[list[F32]]:
    """Return the answers of two pipeline stages, then of two data parallel ranks, in one process group."""
    return [column for layout in (Layout(pp=2), Layout(dp=2)) for column in answer(world, layout, [query])]


def _score(actor: RankTrainer, sequences: Sequence[I32]) -> list[F32]:
    column = actor.score(to_rows([ScoredSequence(ids) for ids in sequences]))
    if column is None:
        return []
    cuts = np.cumsum([len(ids) for ids in sequences])[:-1]
    return [part[1:] for part in np.split(column, cuts)]
