"""Random scored groups for property tests: uneven groups, several turns, tools, failures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status

VOCAB = 11
REWARDS = (0.0, 1.0, 0.25, -2.0)


@dataclass(frozen=True)
class SampleShape:
    """Lengths of prompt, model, tool and model tokens, reward and status of a sample."""

    lengths: tuple[int, int, int, int]
    reward: float
    status: Status


# Shapes of one sample, usually completed.
SHAPES = st.builds(
    SampleShape,
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2), st.integers(0, 3)),
    st.sampled_from(REWARDS),
    st.sampled_from([Status.COMPLETED] * 5 + [Status.TRUNCATED, Status.FAILED, Status.ABORTED]),
)
STRUCTURES = st.lists(st.lists(SHAPES, min_size=1, max_size=3), min_size=2, max_size=3)


def batches() -> st.SearchStrategy[list[SampleGroup]]:
    """Strategy of two or three groups of two to four samples, each with at least one completed sample."""
    first = SampleShape((1, 2, 0, 0), 1.0, Status.COMPLETED)
    return st.builds(
        lambda structure, seed: groups_of([[first, *group] for group in structure], seed=seed),
        STRUCTURES,
        st.integers(0, 10_000),
    )


def groups_of(structure: list[list[SampleShape]], seed: int = 0) -> list[SampleGroup]:
    """Return groups of these shapes with random tokens and rollout log-probabilities."""
    rng = np.random.default_rng(seed)
    prompt = Prompt(0, np.zeros(1, dtype=np.int32), "", "1", None)
    counter = iter(range(10_000))
    return [
        SampleGroup(g, prompt, tuple(_sample(shape, g, e, next(counter), rng) for e, shape in enumerate(group)))
        for g, group in enumerate(structure)
    ]


def _sample(shape: SampleShape, group_id: int, episode_id: int, sample_id: int, rng: np.random.Generator) -> Sample:
    sources = (Source.PROMPT, Source.MODEL, Source.TOOL, Source.MODEL)
    spans: list[Span] = []
    for source, length in zip(sources, shape.lengths, strict=True):
        if length:
            start = spans[-1].stop if spans else 0
            spans.append(Span(start, start + length, source, 3 if source is Source.MODEL else -1))
    total = spans[-1].stop
    is_sampled = np.concatenate([[s.source is Source.MODEL] * (s.stop - s.start) for s in spans])
    logprobs = np.where(is_sampled, rng.uniform(-3.5, -1.5, total), np.nan).astype(np.float32)
    return Sample(
        group_id=group_id,
        episode_id=episode_id,
        sample_id=sample_id,
        seed=0,
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        logprobs=logprobs,
        spans=tuple(spans),
        status=shape.status,
        reward=Reward(shape.reward),
    )
