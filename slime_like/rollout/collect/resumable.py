"""An engine as one group sees it: interrupted answers are continued behind the generate function's back.

consumes  a lease of one engine, so that a continuation finds what its group has cached there; where that engine is lost, the
          lease moves to another, which goes on from the tokens that were answered
produces  whole completions, whose tokens each carry the version and log-probability of their own sampling
waits for an engine that serves; for the gate: shut between rollouts, where what is unfinished stays as it is
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

ABORT_AGAIN_S = 0.2  # a request on its way to the scheduler is not seen by an abort


class PauseGate:
    """Lets the requests of many groups through, or ends those inside and holds the rest back."""

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
        """Seconds for which it has been shut so far."""
        return self._shut_before + (0.0 if self._shut_at is None else time.monotonic() - self._shut_at)

    def open(self) -> None:
        """Let requests through."""
        self._shut_before, self._shut_at = self.shut_s, None
        self._open.set()

    async def shut(self, abort_all: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
        """Hold further requests back, and end those inside with the tokens they have: ``abort_all`` tells the engines of then.

        Raises ``DeadlineExceeded``.
        """
        self._open.clear()
        self._shut_at = self._shut_at or time.monotonic()
        while self._inside:
            await abort_all()
            left = deadline.remaining(f"{self._inside} aborted requests")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(ABORT_AGAIN_S, left))

    @asynccontextmanager
    async def passage(self) -> AsyncGenerator[None]:
        """A request: waits while the gate is shut."""
        while not self._open.is_set():  # it may be shut again before who was woken runs
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
        """``trained``: the distribution that answers must come from, as they are trained on."""
        self._lease, self._journal, self._gate, self._usage = lease, journal, gate, usage
        self._trained = trained

    @property
    def held_s(self) -> float:
        """Seconds for which requests have been held back so far, or no engine was there to answer them."""
        return self._gate.shut_s + self._lease.starved_s

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """``len(seeds)`` completions of one prompt, in as many requests as it takes.

        ``finish`` is ``abort`` only where the engine ended a request that this run did not abort.
        Raises ``ConfigError`` where ``sampling`` is another distribution than what is trained on.
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
        found = None
        while found is None:
            await self._lease.settle()
            found = await self._lease.ask(lambda engine: engine.score(token_ids, temperature))
        return found

    async def _continue(self, call: EngineCall, sampling: Sampling) -> bool:
        """One request for all that is unfinished; whether what is then still unfinished may be asked for again."""
        places = call.unfinished()
        done = [call.completions[i] for i in places]

        async def extend(engine: EngineClient) -> tuple[str, list[Completion], bool]:
            aborts = engine.num_ended_aborts
            parts = await engine.extend(
                [np.concatenate([call.token_ids, c.token_ids]).astype(np.int32) for c in done],
                [call.seeds[i] for i in places],
                [max(1, sampling.max_new_tokens - len(c.token_ids)) for c in done],
                sampling,
            )
            return engine.name, parts, engine.num_aborts > aborts

        answered = await self._lease.ask(extend)
        if answered is None:  # the engine is lost, and with it what it sampled for this request
            return True
        name, parts, ours = answered
        for place, before, part in zip(places, done, parts, strict=True):
            call.completions[place] = joined(before, continuable(part) if ours else part)
        self._lease.spend(sum(len(part.token_ids) for part in parts))
        self._usage.add(name, parts)
        return ours or all(part.finish != ABORT for part in parts)
