"""Data types of a rollout, from prompt to scored group. They hold plain numpy arrays, because they cross process boundaries."""

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
RoutedExperts = npt.NDArray[np.uint8 | np.uint16]  # [N, blocks, experts per token], see ``data.routing``


class Source(StrEnum):
    """Origin of a span of tokens. Only ``MODEL`` tokens are trained on."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


class Status(StrEnum):
    """Outcome of a sample."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


UNTRAINED = (Status.FAILED, Status.ABORTED)
"""Samples with these statuses are not scored, have weight 0 in the loss and are excluded from baselines."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, stop)`` of a sample with their source and, for model tokens, the weight version.

    Example: a prompt of 3 tokens and 4 sampled tokens, the last 2 of them after a push:
    ``(Span(0, 3, PROMPT, -1), Span(3, 5, MODEL, 6), Span(5, 7, MODEL, 7))``.
    """

    start: int
    stop: int
    source: Source
    version: int = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenised row of a dataset."""

    prompt_id: int  # index of the row in its dataset
    token_ids: I32  # [P]
    text: str  # decoded tokens, for logs and rewards
    label: str | None
    rm_type: str | None  # reward of this row instead of ``reward.name``, unless ``reward.name`` is a path
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dataset: str = "train"
    messages: tuple[Mapping[str, Any], ...] = ()  # chat messages of the row, from which ``text`` was rendered


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of a sample.

    Advantages use ``score``; ``accuracy`` (0 to 1, or None if the reward has none) is only reported. ``parts``
    contains the unweighted score of each component of a composed reward.
    """

    score: float
    accuracy: float | None = None
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of an episode or of part of one, in the order in which the engine read and sampled them.

    An episode is one response to the prompt. A run of an agent is an episode with one sample per conversation.
    """

    group_id: int
    episode_id: int
    sample_id: int
    seed: int
    token_ids: I32  # [L]
    logprobs: F32  # [L], nan if the token was not sampled
    spans: tuple[Span, ...]  # contiguous, cover [0, L)
    status: Status
    text: str = ""  # decoded model tokens, for rewards, logs and dumps: never re-tokenised
    reward: Reward | None = None
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        assert self.logprobs.shape == (n,), f"{self.logprobs.shape} logprobs for {n} tokens"
        edges = [0, *(s.stop for s in self.spans)]
        assert [s.start for s in self.spans] == edges[:-1], f"spans do not tile: {self.spans}"
        assert edges[-1] == n, f"spans end at {edges[-1]} of {n} tokens"

    @property
    def trained_reward(self) -> Reward | None:
        """Return the reward that enters baselines; None if the sample failed, was aborted or is not scored yet."""
        return None if self.status in UNTRAINED else self.reward

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the weight version of each model span, oldest first."""
        return tuple(sorted(s.version for s in self.spans if s.source is Source.MODEL))

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens before the first model token, or of all tokens if the model sampled none."""
        return next((s.start for s in self.spans if s.source is Source.MODEL), len(self.token_ids))

    @property
    def num_response_tokens(self) -> int:
        """Return the number of tokens that the model sampled or, in a demonstration, of its trained tokens."""
        return sum(s.stop - s.start for s in self.spans if s.source is Source.MODEL)

    @property
    def num_turns(self) -> int:
        """Return the number of model turns. A push of weights during a turn does not end the turn."""
        previous_sources = [None, *(span.source for span in self.spans)]
        return sum(
            span.source is Source.MODEL and previous is not Source.MODEL
            for previous, span in zip(previous_sources, self.spans, strict=False)
        )


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt. Baselines, filters and the assignment to an engine apply to whole groups."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def trained_scores(self) -> set[float]:
        """Return the distinct scores that enter the group's baseline.

        If there are fewer than two, slime_like's group advantages are 0, unless a penalty for long responses
        (``data.overlong``) changes the scores later. A user's group advantages may differ.
        """
        return {reward.score for sample in self.samples if (reward := sample.trained_reward) is not None}

    @property
    def oldest_version(self) -> int:
        """Return the lowest weight version of the sampled tokens; -1 if none was sampled."""
        return min((v for s in self.samples for v in s.versions), default=-1)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Result of training on one rollout.

    "Step" means one rollout here and in metrics, but one optimizer step in ``OptimizerStep`` and ``StepBatch``.
    """

    version: int  # version of the new weights
    metrics: tuple[Metric, ...]
