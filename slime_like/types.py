"""What flows round the circle, from prompt to scored group. numpy only: these values cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.metrics.types import Metric

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class Source(StrEnum):
    """Who wrote a span of tokens. Only ``MODEL`` tokens are trained on."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


class Status(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, stop)`` of a sample: who wrote them and, for model tokens, under which weight version.

    Example: prompt of 3 and 4 sampled tokens, the last 2 after a push:
    ``(Span(0, 3, PROMPT, -1), Span(3, 5, MODEL, 6), Span(5, 7, MODEL, 7))``.
    """

    start: int
    stop: int
    source: Source
    version: int = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset, tokenised once."""

    prompt_id: int  # index of the row in its dataset
    token_ids: I32  # [P]
    text: str  # what the tokens say, for logs and rewards
    label: str | None
    rm_type: str | None  # reward of this row, in place of the run's default
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dataset: str = "train"
    messages: tuple[Mapping[str, Any], ...] = ()  # chat messages of the row; ``text`` is rendered from those asked


@dataclass(frozen=True, slots=True)
class Reward:
    """``score`` drives the advantage; ``accuracy`` (0 or 1, where the task has a right answer) is what is reported.

    ``parts`` are the scores of a composed reward's parts, before their weights.
    """

    score: float
    accuracy: float | None = None
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode: every token of it, in the order the engine saw them."""

    group_id: int
    episode_id: int
    sample_id: int
    seed: int
    token_ids: I32  # [L]
    logprobs: F32  # [L], nan where the token was not sampled
    spans: tuple[Span, ...]  # contiguous, cover [0, L)
    status: Status
    text: str = ""  # decoded model tokens, for the reward only: never tokenised again
    reward: Reward | None = None
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        assert self.logprobs.shape == (n,), f"{self.logprobs.shape} logprobs for {n} tokens"
        edges = [0, *(s.stop for s in self.spans)]
        assert [s.start for s in self.spans] == edges[:-1], f"spans do not tile: {self.spans}"
        assert edges[-1] == n, f"spans end at {edges[-1]} of {n} tokens"

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the model spans, oldest first."""
        return tuple(sorted(s.version for s in self.spans if s.source is Source.MODEL))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first model token."""
        return next((s.start for s in self.spans if s.source is Source.MODEL), len(self.token_ids))

    @property
    def num_response_tokens(self) -> int:
        """Tokens the model sampled."""
        return sum(s.stop - s.start for s in self.spans if s.source is Source.MODEL)

    @property
    def num_turns(self) -> int:
        """How often the model took up writing; a change of weights within a turn does not end it."""
        before = [None, *(span.source for span in self.spans)]
        return sum(
            span.source is Source.MODEL and last is not Source.MODEL
            for last, span in zip(before, self.spans, strict=False)
        )


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt: the unit of baselines, filters and engine choice."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token sampled for this group; -1 if none was sampled."""
        return min((v for s in self.samples for v in s.versions), default=-1)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a trainer step reports: the version of the weights it made and its metrics."""

    version: int
    metrics: tuple[Metric, ...]
