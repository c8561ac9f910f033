"""Prompts in the order they are asked: first those that came back unanswered, then the data source's."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.interfaces import DataSource
from slime_like.types import Prompt


class PromptQueue:
    """A data source to which prompts can be given back."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.returned: tuple[Prompt, ...] = ()

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        first, self.returned = self.returned[:n], self.returned[n:]
        return [*first, *self.source.next(n - len(first))] if len(first) < n else list(first)

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """These were taken and not answered: they come before all others."""
        self.returned = (*prompts, *self.returned)
