"""Router that assigns each group to the serving engine, and its data-parallel rank, with the fewest outstanding tokens.

The samples of a group share the prefix cache of that rank. ``RequestCounts`` measures how evenly the load is balanced.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from slime_like.errors import EngineError, SlimeLikeError
from slime_like.interfaces import Completion
from slime_like.metrics.types import Max, Mean, Metric
from slime_like.rollout.engine.client import EngineClient


class EngineAssignment:
    """Assignment of a group to an engine, with ``outstanding`` tokens that may still be sampled."""

    def __init__(self, outstanding: int, engine: EngineClient | None) -> None:
        self.outstanding = outstanding
        self.engine = engine  # None while no engine serves
        self.dp_rank: int | None = None  # rank of an engine with data-parallel attention

    def spend(self, tokens: int) -> None:
        """Subtract the number of sampled tokens from ``outstanding``, which never falls below 0."""
        self.outstanding = max(0, self.outstanding - tokens)


class EngineRouter:
    """Router that assigns one engine to each group; continuations of a group stay on its engine while the engine serves."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = list(engines)
        self._assignments: list[EngineAssignment] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._no_engine_since = None if engines else time.monotonic()
        self._no_engine_before_s = 0.0

    @property
    def engines(self) -> list[EngineClient]:
        """Engines that serve now."""
        return list(self._engines)

    @property
    def no_engine_s(self) -> float:
        """Total seconds during which no engine served."""
        return self._no_engine_before_s + (
            0.0 if self._no_engine_since is None else time.monotonic() - self._no_engine_since
        )

    def admit(self, engine: EngineClient) -> None:
        """Let groups be assigned to ``engine``. Idempotent."""
        if engine not in self._engines:
            self._engines.append(engine)
        self._no_engine_before_s, self._no_engine_since = self.no_engine_s, None
        self._wake()

    def withdraw(self, engine: EngineClient) -> None:
        """Stop assigning groups to ``engine``; its current requests continue until they end."""
        self._engines = [candidate for candidate in self._engines if candidate is not engine]
        if not self._engines and self._no_engine_since is None:
            self._no_engine_since = time.monotonic()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make current and future calls of ``wait_for_engine`` raise a copy of ``error`` (``copy_error``)."""
        self._failure = error
        self._wake()

    async def wait_until_none_serves(self) -> None:
        """Wait until no engine serves."""
        while self._engines:
            await self._changed.wait()

    @contextmanager
    def assign(self, tokens: int) -> Generator[EngineAssignment]:
        """Yield an assignment to the least loaded engine. ``tokens`` count as its load until they are spent or the block ends.

        If no engine serves, the assignment has no engine until ``wait_for_engine`` assigns one.
        """
        assignment = EngineAssignment(tokens, None)
        if self._engines:
            self._choose_engine(assignment)
        self._assignments.append(assignment)
        try:
            yield assignment
        finally:
            self._assignments = [candidate for candidate in self._assignments if candidate is not assignment]

    async def wait_for_engine(self, assignment: EngineAssignment) -> EngineClient:
        """Wait until an engine serves; return the assigned one if it serves, otherwise assign and return the least loaded one.

        Raises a copy (``copy_error``) of the error passed to ``fail``.
        """
        while self._failure is None and not self._engines:
            await self._changed.wait()
        if self._failure is not None:
            raise copy_error(self._failure)
        if (engine := self.serving_engine(assignment)) is None:
            engine = self._choose_engine(assignment)
        return engine

    def serving_engine(self, assignment: EngineAssignment) -> EngineClient | None:
        """Return the assigned engine; None if it does not serve or none is assigned, so that the group needs another."""
        return assignment.engine if assignment.engine in self._engines else None

    def _choose_engine(self, assignment: EngineAssignment) -> EngineClient:
        """Assign the least loaded engine and its least loaded data-parallel rank, and return the engine."""
        rank_loads = {engine: [0] * engine.num_dp_ranks for engine in self._engines}
        for listed in self._assignments:
            if listed.engine in rank_loads:
                rank_loads[listed.engine][listed.dp_rank or 0] += listed.outstanding
        engine = min(rank_loads, key=lambda candidate: sum(rank_loads[candidate]))
        loads = rank_loads[engine]
        assignment.engine, assignment.dp_rank = engine, loads.index(min(loads)) if len(loads) > 1 else None
        return engine

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RequestCounts:
    """Counters of requests and tokens. A continuation counts as a request whose prompt includes the tokens sampled before."""

    def __init__(self, num_engines: int) -> None:
        """``num_engines`` counts all engines of the rollout manager, whether they serve or not."""
        self.num_engines = num_engines
        self._sampled: Counter[str] = Counter()
        self._prompt = self._cached = self._requests = 0

    def add(self, engine: str, completions: Sequence[Completion]) -> None:
        """Count completions of the engine named ``engine``; a restarted engine keeps its name."""
        self._sampled[engine] += sum(len(c.token_ids) for c in completions)
        self._prompt += sum(c.prompt_tokens for c in completions)
        self._cached += sum(c.cached_tokens for c in completions)
        self._requests += len(completions)

    def drain(self) -> list[Metric]:
        """Return the metrics since the last call. Metrics that slime also reports have slime's names."""
        metrics: list[Metric] = []
        if self._prompt:
            metrics += [
                Mean("rollout/prefix_cache_hit_rate", self._cached / self._prompt, weight=self._prompt),
                Mean("rollout/avg_cached_tokens_per_sample", self._cached / self._requests, weight=self._requests),
            ]
        if self.num_engines > 1 and (num_sampled := self._sampled.total()):
            metrics.append(Max("rollout/engine_load_max", max(self._sampled.values()) * self.num_engines / num_sampled))
        self.__init__(self.num_engines)
        return metrics


def copy_error(error: Exception) -> Exception:
    """Return a copy of ``error`` to be raised in another task; an ``EngineError`` if ``error`` is not a ``SlimeLikeError``."""
    copy = (
        type(error)(str(error))
        if isinstance(error, SlimeLikeError)
        else EngineError(f"{type(error).__name__}: {error}")
    )
    copy.__cause__ = error
    return copy
