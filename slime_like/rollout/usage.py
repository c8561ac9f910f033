"""What the engines did for training rollouts: how even their load was, and how much of the prompts they had cached."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.interfaces import Completion
from slime_like.metrics.types import Last, Metric


class Usage:
    """Counts over requests, a continuation being a request whose prompt holds what was sampled before."""

    def __init__(self, num_engines: int) -> None:
        self._sampled = [0] * num_engines
        self._prompt = self._cached = self._requests = 0

    def add(self, engine: int, completions: Sequence[Completion]) -> None:
        """Answers of one engine."""
        self._sampled[engine] += sum(len(c.token_ids) for c in completions)
        self._prompt += sum(c.prompt_tokens for c in completions)
        self._cached += sum(c.cached_tokens for c in completions)
        self._requests += len(completions)

    def drain(self) -> list[Metric]:
        """Since the last call; names are slime's where it has one."""
        found: list[Metric] = []
        if self._prompt:
            found += [
                Last("rollout/prefix_cache_hit_rate", self._cached / self._prompt),
                Last("rollout/avg_cached_tokens_per_sample", self._cached / self._requests),
            ]
        if len(self._sampled) > 1 and sum(self._sampled):
            found.append(Last("rollout/engine_load_max", max(self._sampled) * len(self._sampled) / sum(self._sampled)))
        self.__init__(len(self._sampled))
        return found
