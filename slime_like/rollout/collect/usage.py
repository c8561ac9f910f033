"""Engine usage of training rollouts: load balance and prefix-cache hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slime_like.interfaces import Completion
from slime_like.metrics.types import Last, Metric


class Usage:
    """Counts over requests. A continuation is a request whose prompt includes the tokens sampled before."""

    def __init__(self, num_engines: int) -> None:
        """``num_engines``: all engines of the run, whether they serve or not."""
        self._num_engines = num_engines
        self._sampled: Counter[str] = Counter()
        self._prompt = self._cached = self._requests = 0

    def add(self, engine: str, completions: Sequence[Completion]) -> None:
        """Count completions of the engine named ``engine``; a restarted engine keeps its name."""
        self._sampled[engine] += sum(len(c.token_ids) for c in completions)
        self._prompt += sum(c.prompt_tokens for c in completions)
        self._cached += sum(c.cached_tokens for c in completions)
        self._requests += len(completions)

    def drain(self) -> list[Metric]:
        """Return the metrics since the last call, named as in slime if slime has them."""
        metrics: list[Metric] = []
        if self._prompt:
            metrics += [
                Last("rollout/prefix_cache_hit_rate", self._cached / self._prompt),
                Last("rollout/avg_cached_tokens_per_sample", self._cached / self._requests),
            ]
        if self._num_engines > 1 and (total := self._sampled.total()):
            metrics.append(Last("rollout/engine_load_max", max(self._sampled.values()) * self._num_engines / total))
        self.__init__(self._num_engines)
        return metrics
