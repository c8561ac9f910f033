"""Prompts in the order they are asked: first those that came back unanswered, then the data source's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.interfaces import DataSource
from slime_like.types import Prompt


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt to be answered, and how often a rollout has begun and given it up."""

    prompt: Prompt
    given_up: int = 0


class PromptQueue:
    """A data source to which prompts can be given back."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.returned: tuple[QueuedPrompt, ...] = ()

    def take(self, n: int) -> list[QueuedPrompt]:
        """The next ``n`` prompts."""
        first, self.returned = self.returned[:n], self.returned[n:]
        fresh = self.source.next(n - len(first)) if len(first) < n else []
        return [*first, *map(QueuedPrompt, fresh)]

    def give_back(self, waiting: Sequence[QueuedPrompt]) -> None:
        """These were taken and not answered: they come before all others."""
        self.returned = (*waiting, *self.returned)
