"""A trainer rank that scores sequences under ``run.deterministic=true``: what the engine's bits are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime_like.config.resolved import Layout
from slime_like.rollout.probe import ProbeScores, to_rows
from slime_like.types import F32, I32
from tests.train.jobs import make_actor
from tests.train.ranks import World


@dataclass(frozen=True, slots=True)
class Question:
    """Sequences to be scored under one model at one temperature."""

    model: Path
    temperature: float
    sequences: tuple[I32, ...]


def answer(world: World, questions: Sequence[Question]) -> list[list[F32]]:
    """Per question, per sequence the log-probabilities [L - 1] of tokens 1 .. L - 1; packed rows, and rows of one."""
    from slime_like.train.megatron import host

    host.install("cpu")
    answers: list[list[F32]] = []
    for question in questions:
        actor = make_actor(world, question.model, Layout(), temperature=question.temperature, deterministic=True)
        packed = _score(actor, question.sequences)
        for sequence, together in zip(question.sequences[:3], packed, strict=False):
            (alone,) = _score(actor, [sequence])
            assert np.array_equal(alone, together), "a sequence's scores depend on what it is packed with"
        answers.append(packed)
    return answers


def _score(actor: object, sequences: Sequence[I32]) -> list[F32]:
    column = actor.score(to_rows(ProbeScores(0, tuple(sequences), ())))  # pyright: ignore[reportAttributeAccessIssue]
    cuts = np.cumsum([len(ids) for ids in sequences])[:-1]
    return [part[1:] for part in np.split(column, cuts)]
