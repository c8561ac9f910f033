"""Prompts in the order of their use: first those given back unanswered, then those of the data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.interfaces import DataSource
from slime_like.types import Prompt


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt to be answered, and the number of rollouts that began and gave it up."""

    prompt: Prompt
    given_up: int = 0


class PromptQueue:
    """A data source to which prompts can be given back."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.returned: tuple[QueuedPrompt, ...] = ()

    def take(self, n: int) -> list[QueuedPrompt]:
        """Return the next ``n`` prompts."""
        first, self.returned = self.returned[:n], self.returned[n:]
        fresh = self.source.next(n - len(first)) if len(first) < n else []
        return [*first, *map(QueuedPrompt, fresh)]

    def give_back(self, prompts: Sequence[QueuedPrompt]) -> None:
        """Put back prompts that were taken and not answered; they come before all others."""
        self.returned = (*prompts, *self.returned)
