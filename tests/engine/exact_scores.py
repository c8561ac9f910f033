"""A trainer rank that scores sequences under ``run.deterministic=true``: what the engine's bits are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slime_like.config.schema.resolved import Layout
from slime_like.rollout.pool.probe import to_rows
from slime_like.types import F32, I32
from tests.train.jobs import make_actor
from tests.train.ranks import World

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.trainer import RankTrainer


@dataclass(frozen=True, slots=True)
class Question:
    """Sequences to be scored under one model at one temperature."""

    model: Path
    temperature: float
    sequences: tuple[I32, ...]


def answer(world: World, layout: Layout, questions: Sequence[Question]) -> list[list[F32]]:
    """Per question, per sequence the log-probabilities [L - 1] of tokens 1 .. L - 1, on the reporter; else nothing."""
    from slime_like.train.megatron.platform import host

    host.install("cpu")
    answers: list[list[F32]] = []
    for question in questions:
        actor = make_actor(world, question.model, layout, temperature=question.temperature, deterministic=True)
        packed = _score(actor, question.sequences)
        for i, sequence in enumerate(question.sequences[:3]):
            for alone in _score(actor, [sequence]):
                assert np.array_equal(alone, packed[i]), "a sequence's scores depend on what it is packed with"
        answers += [packed] if actor.rank_info.is_reporter else []
    return answers


def both_layouts(world: World, question: Question) -> list[list[F32]]:
    """``answer`` of two pipeline stages, then of two data parallel ranks, in one process group."""
    return [column for layout in (Layout(pp=2), Layout(dp=2)) for column in answer(world, layout, [question])]


def _score(actor: RankTrainer, sequences: Sequence[I32]) -> list[F32]:
    column = actor.score(to_rows(sequences))
    if column is None:
        return []
    cuts = np.cumsum([len(ids) for ids in sequences])[:-1]
    return [part[1:] for part in np.split(column, cuts)]
