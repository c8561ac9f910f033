"""Engine interface of one group, which continues interrupted completions without the generate function noticing.

consumes  an assignment to one engine, so that a continuation finds its group's prefix in the cache; if that engine is lost,
          the group moves to another engine, which continues from the tokens already returned
produces  finished completions, in which each token has the version and log-probability with which it was sampled
waits for an engine that serves; for the gate, which is closed between rollouts while unfinished completions are retained

A generate function does not notice an interruption: its calls just wait. After a restart of the process, the function runs
again, and calls that it repeats are served from a record (``CallJournal``). A call that differs from the recorded ones (for
example because a tool returned another result) is sent to an engine.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import numpy as np

from slime_like.errors import ConfigError
from slime_like.interfaces import Completion, Sampling
from slime_like.rollout.collect.journal import ABORT, CallJournal, EngineCall
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import EngineAssignment, RequestCounts
from slime_like.types import F32, I32
from slime_like.util.deadline import Deadline

MAX_SEED = 2**31 - 1


def sample_seeds(run_seed: int, stream: str, first_sample_id: int, num_samples: int) -> list[int]:
    """Return a seed in ``[0, 2**31 - 1)`` for each of ``num_samples`` samples of ``stream``, from ``first_sample_id`` on.

    ``stream`` is "train", or names a held-out dataset. A seed depends on nothing else, so a resumed run draws the same seeds.
    """
    tag = zlib.crc32(stream.encode())
    return [
        int(np.random.SeedSequence([run_seed, tag, first_sample_id + i]).generate_state(1, np.uint32)[0]) % MAX_SEED
        for i in range(num_samples)
    ]


def turn_seed(sample_seed: int, turn: int) -> int:
    """Return the seed of request ``turn`` of a sample. It depends on ``turn``, as requests may start from the same tokens."""
    return int(np.random.SeedSequence([sample_seed, turn]).generate_state(1, np.uint32)[0]) % MAX_SEED


def deviations(run: Sampling, requested: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """Return a dict from name to (requested, run's value) of settings that differ. None requests the run's value."""
    defaults = {name: getattr(run, name) for name in requested}
    return {
        name: (value, defaults[name])
        for name, value in requested.items()
        if value is not None and value != defaults[name]
    }


def check_generate(run: Sampling, requested: Sampling) -> None:
    """Raise ``ConfigError`` if a generate function requests a distribution other than the run's.

    The trainer computes log-probabilities under the run's settings. Maximum length and stop tokens may differ.
    """
    settings = {"temperature": requested.temperature, "top_p": requested.top_p, "top_k": requested.top_k}
    for name, (value, run_value) in deviations(run, settings).items():
        raise ConfigError(
            f"rollout.generate sends requests with {name}={value:g} in training, where the run samples at {name}={run_value:g}: "
            "the trainer would compute log-probabilities of another distribution; create its Sampling with "
            "dataclasses.replace(context.sampling, max_new_tokens=..., stop_token_ids=...)"
            + (f", or set rollout.temperature={value:g}" if name == "temperature" and value > 0 else "")
        )


ABORT_AGAIN_S = 0.2  # aborts are repeated, since they miss requests that have not reached the scheduler


def drop_last_token(part: Completion) -> Completion:
    """Return an interrupted completion without its last token, so that it is sampled again; other completions unchanged.

    SGLang reports a request as aborted even if the abort arrives in the step that samples its end-of-sequence token (or its last
    allowed token). A request continued after that token would never end. Under the same weights, the same seed draws the same
    token at the same position.
    """
    if part.finish != ABORT or not len(part.token_ids):
        return part
    n = len(part.token_ids) - 1
    versions = tuple((start, min(stop, n), version) for start, stop, version in part.versions if start < n)
    experts = None if part.routed_experts is None else part.routed_experts[:-1]
    return replace(
        part, token_ids=part.token_ids[:n], logprobs=part.logprobs[:n], versions=versions, routed_experts=experts
    )


class PauseGate:
    """Gate for the requests of many groups. Closing it aborts requests in flight and holds new requests back."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._shut_at: float | None = None
        self._shut_before_s = 0.0

    @property
    def shut_s(self) -> float:
        """Total seconds for which the gate has been closed."""
        return self._shut_before_s + (0.0 if self._shut_at is None else time.monotonic() - self._shut_at)

    def open(self) -> None:
        """Let requests through."""
        self._shut_before_s, self._shut_at = self.shut_s, None
        self._open.set()

    async def shut(self, abort_all: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
        """Close the gate: hold new requests back and abort those in flight, which keep their sampled tokens.

        ``abort_all`` aborts the requests of all engines and is repeated until none is in flight. Raises ``DeadlineExceeded``.
        """
        self._open.clear()
        self._shut_at = self._shut_at or time.monotonic()
        while self._num_inside:
            await abort_all()
            remaining_s = deadline.remaining(f"{self._num_inside} aborted requests")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(ABORT_AGAIN_S, remaining_s))

    @asynccontextmanager
    async def passage(self) -> AsyncGenerator[None]:
        """Wait until the gate is open; a request counts as inside the gate until the block ends."""
        while not self._open.is_set():  # the gate may be closed again before this task runs
            await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()


class ResumableEngine:
    """Implementation of ``interfaces.Engine`` for one group."""

    def __init__(
        self,
        pool: EnginePool,
        assignment: EngineAssignment,
        journal: CallJournal,
        gate: PauseGate,
        usage: RequestCounts,
        required_sampling: Sampling | None = None,
    ) -> None:
        """``required_sampling``: distribution that completions must have because they are trained on; None if they are not."""
        self._pool, self._assignment = pool, assignment
        self._journal, self._gate, self._usage = journal, gate, usage
        self._required_sampling = required_sampling

    @property
    def paused_s(self) -> float:
        """Total seconds for which requests were held back by the gate or no engine was available."""
        return self._gate.shut_s + self._pool.router.no_engine_s

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """Return ``len(seeds)`` completions of one prompt, over as many requests as needed.

        ``finish`` is ``abort`` only if the engine ended a request that this run did not abort.
        Raises ``ConfigError`` if ``sampling`` differs from the distribution that is trained on.
        """
        if self._required_sampling is not None:
            check_generate(self._required_sampling, sampling)
        call = self._journal.call(token_ids, seeds)
        while call.unfinished_indices():
            await self._pool.router.wait_for_engine(self._assignment)
            async with self._gate.passage():
                if not await self._continue(call, sampling):
                    break
        return call.completions()

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        """Return [L - 1] log-probabilities per sequence; see ``interfaces.Engine``."""
        scores = None
        while scores is None:
            engine = await self._pool.router.wait_for_engine(self._assignment)
            scores = await self._pool.call_assigned(self._assignment, engine.score(token_ids, temperature))
        return scores

    async def _continue(self, call: EngineCall, sampling: Sampling) -> bool:
        """Send one request for all unfinished completions; return whether those still unfinished may be requested again."""
        engine = self._pool.router.serving_engine(self._assignment)
        if engine is None:  # withdrawn while the gate was closed
            return True
        indices = call.unfinished_indices()
        result = await self._pool.call_assigned(self._assignment, self._extend(engine, call, indices, sampling))
        if result is None:  # the engine was lost together with the tokens of this request
            return True
        parts, aborted_by_run = result
        call.append(indices, [drop_last_token(part) if aborted_by_run else part for part in parts])
        self._assignment.spend(sum(len(part.token_ids) for part in parts))
        self._usage.add(engine.name, parts)
        return aborted_by_run or all(part.finish != ABORT for part in parts)

    async def _extend(
        self, engine: EngineClient, call: EngineCall, indices: Sequence[int], sampling: Sampling
    ) -> tuple[list[Completion], bool]:
        """Return the continuations of ``indices``, and whether an abort of this run may have ended them."""
        aborts = engine.num_ended_aborts
        parts = await engine.extend(
            [call.sequence(i).token_ids for i in indices],
            [call.seeds[i] for i in indices],
            [max(1, sampling.max_new_tokens - call.num_sampled(i)) for i in indices],
            sampling,
            for_training=self._required_sampling is not None,
            dp_rank=self._assignment.dp_rank,
        )
        return parts, engine.num_aborts > aborts
