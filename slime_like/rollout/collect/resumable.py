"""The engine as one group sees it: interrupted answers are continued without the generate function noticing.

consumes  a lease of one engine, so that a continuation finds its group's prefix in the cache; if that engine is lost, the
          lease moves to another, which continues from the tokens already returned
produces  complete answers, in which each token has the version and log-probability of its own sampling
waits for an engine that serves; for the gate, which is shut between rollouts while unfinished answers are retained
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np

from slime_like.interfaces import Completion, Sampling
from slime_like.rollout.collect.partial import ABORT, EngineCall, PartialCompletions, continuable, joined
from slime_like.rollout.collect.usage import Usage
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.generate.trained_sampling import check_generate
from slime_like.rollout.pool.router import Lease
from slime_like.types import F32, I32
from slime_like.util.deadline import Deadline

ABORT_AGAIN_S = 0.2  # a request on its way to the scheduler is missed by an abort


class PauseGate:
    """Lets requests of many groups through, or aborts requests in flight and holds new ones back."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._shut_at: float | None = None
        self._shut_before = 0.0

    @property
    def shut_s(self) -> float:
        """Total seconds for which the gate has been shut."""
        return self._shut_before + (0.0 if self._shut_at is None else time.monotonic() - self._shut_at)

    def open(self) -> None:
        """Let requests through."""
        self._shut_before, self._shut_at = self.shut_s, None
        self._open.set()

    async def shut(self, abort_all: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
        """Hold new requests back and abort those in flight, which keep their sampled tokens.

        ``abort_all`` is called on the engines that serve at that moment. Raises ``DeadlineExceeded``.
        """
        self._open.clear()
        self._shut_at = self._shut_at or time.monotonic()
        while self._inside:
            await abort_all()
            remaining_s = deadline.remaining(f"{self._inside} aborted requests")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(ABORT_AGAIN_S, remaining_s))

    @asynccontextmanager
    async def passage(self) -> AsyncGenerator[None]:
        """Hold one request inside the gate; waits while the gate is shut."""
        while not self._open.is_set():  # the gate may be shut again before this task runs
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()


class ResumableEngine:
    """Implements ``interfaces.Engine`` for one group."""

    def __init__(
        self, lease: Lease, journal: PartialCompletions, gate: PauseGate, usage: Usage, trained: Sampling | None = None
    ) -> None:
        """``trained``: the sampling distribution that answers must have because they are trained on; None if they are not."""
        self._lease, self._journal, self._gate, self._usage = lease, journal, gate, usage
        self._trained = trained

    @property
    def paused_s(self) -> float:
        """Total seconds for which requests were held back by the gate or no engine was available."""
        return self._gate.shut_s + self._lease.starved_s

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """Return ``len(seeds)`` completions of one prompt, over as many requests as needed.

        ``finish`` is ``abort`` only if the engine ended a request that this run did not abort.
        Raises ``ConfigError`` if ``sampling`` is not the distribution that is trained on.
        """
        if self._trained is not None:
            check_generate(self._trained, sampling)
        call = self._journal.call(token_ids, seeds)
        while call.unfinished():
            await self._lease.settle()
            async with self._gate.passage():
                if not await self._continue(call, sampling):
                    break
        return tuple(call.completions)

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        """See ``interfaces.Engine``."""
        scores = None
        while scores is None:
            await self._lease.settle()
            scores = await self._lease.ask(lambda engine: engine.score(token_ids, temperature))
        return scores

    async def _continue(self, call: EngineCall, sampling: Sampling) -> bool:
        """Send one request for all unfinished completions; return whether those still unfinished may be requested again."""
        indices = call.unfinished()
        partials = [call.completions[i] for i in indices]

        async def extend(engine: EngineClient) -> tuple[str, list[Completion], bool]:
            aborts = engine.num_ended_aborts
            parts = await engine.extend(
                [np.concatenate([call.token_ids, c.token_ids]).astype(np.int32) for c in partials],
                [call.seeds[i] for i in indices],
                [max(1, sampling.max_new_tokens - len(c.token_ids)) for c in partials],
                sampling,
            )
            return engine.name, parts, engine.num_aborts > aborts

        answered = await self._lease.ask(extend)
        if answered is None:  # the engine is lost, with the tokens of this request
            return True
        name, parts, aborted_here = answered
        for index, partial, part in zip(indices, partials, parts, strict=True):
            call.completions[index] = joined(partial, continuable(part) if aborted_here else part)
        self._lease.spend(sum(len(part.token_ids) for part in parts))
        self._usage.add(name, parts)
        return aborted_here or all(part.finish != ABORT for part in parts)
