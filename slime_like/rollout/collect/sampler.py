"""Sample a group from a prompt with the generate function and the engines, and score it with the reward.

The generate function gets a ``ResumableEngine``, which continues interrupted completions by itself:

consumes  an assignment to one engine, so that a continuation finds its group's prefix in the cache; if that engine is
          lost, the group moves to another engine, which continues from the tokens already returned
produces  finished completions, with the log-probability of each token and the version that sampled it
waits for a serving engine, and for the ``PauseGate``: over-sampling closes it at the end of a rollout. The next
          rollout opens it; with partial rollouts, unfinished completions then continue

During an interruption, calls of ``generate`` just wait. After a restart of the process, the generate function runs again,
and the calls of ``generate`` that it repeats are served from a record (``CallJournal``). A call that differs from the
recorded ones (for example because a tool returned another result) is sent to an engine. Calls of ``score`` are neither held
back by the gate nor recorded.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

import numpy as np

from slime_like.config.schema import names
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import ConfigError, UserCodeError
from slime_like.interfaces import Completion, GenerateContext, GenerateFn, Generator, Sampling, TokenIds, Tokenizer
from slime_like.metrics.types import Metric
from slime_like.registry import resolve
from slime_like.reward.pool import RewardPool
from slime_like.rollout.collect.journal import ABORT, CallJournal, EngineCall, drop_last_token
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import EngineAssignment, RequestCounts
from slime_like.types import F32, I32, UNTRAINED, Prompt, Sample, SampleGroup
from slime_like.util.concurrency import gather_or_cancel
from slime_like.util.deadline import Deadline
from slime_like.util.user_code import name_user_errors

TRAIN_STREAM = "train"  # stream of sampling seeds; each held-out set has its own
MAX_SEED = 2**31 - 1
ABORT_AGAIN_S = 0.2  # aborts are repeated, since they miss requests that have not reached the scheduler


def open_generate(config: RolloutConfig) -> GenerateFn:
    """Return the generate function that ``rollout.generate`` names or, if it names a class, a new instance of the class.

    An instance may own servers and connections. Raises ``ConfigError`` if the name cannot be resolved, or the error of the
    class's constructor.
    """
    target = resolve("rollout.generate", config.generate, names.GENERATE)
    return target(config) if isinstance(target, type) else target


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for ``num_samples`` samples of ``prompt``.

    The run's seed, ``stream``, ``group_id`` and ``num_samples`` determine the samples' seeds.
    """

    prompt: Prompt
    group_id: int
    num_samples: int
    sampling: Sampling
    stream: str = TRAIN_STREAM


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Sampler of scored groups, with the components that all groups share."""

    pool: EnginePool
    rewards: RewardPool
    generate: GenerateFn
    generate_name: str  # rollout.generate, for messages
    tokenizer: Tokenizer  # tokenizer of model.hf_checkpoint
    decode: Callable[[TokenIds], str]  # decodes token ids; drops special tokens
    chat_template_kwargs: Mapping[str, object]
    max_context_len: int
    seed: int
    usage: RequestCounts  # requests of training groups
    trains: bool  # True if groups of the training stream are trained on

    async def group(
        self,
        request: GroupRequest,
        journal: CallJournal | None = None,
        gate: PauseGate | None = None,
        on_generated: Callable[[], None] | None = None,
    ) -> SampleGroup:
        """Sample and score a group, and return it.

        ``journal`` contains the group's earlier calls, and records new ones. While ``gate`` is closed, calls of
        ``ResumableEngine.generate`` wait. ``on_generated`` is called before the samples are scored.
        """
        n, first = request.num_samples, request.group_id * request.num_samples
        seeds = sample_seeds(self.seed, request.stream, first, n)
        context = GenerateContext(
            sampling=request.sampling,
            decode=self.decode,
            group_id=request.group_id,
            first_sample_id=first,
            max_context_len=self.max_context_len,
            tokenizer=self.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        is_training = request.stream == TRAIN_STREAM
        usage = self.usage if is_training else RequestCounts(1)  # evaluation requests are not reported
        with self.pool.router.assign(request.sampling.max_new_tokens * n) as assignment:
            required_sampling = request.sampling if is_training and self.trains else None
            engine = ResumableEngine(
                self.pool, assignment, journal or CallJournal(), gate or PauseGate(), usage, required_sampling
            )
            subject = f"prompt {request.prompt.prompt_id} ({request.prompt.dataset})"
            with name_user_errors("rollout.generate", self.generate_name, subject):
                results = await self.generate(request.prompt, engine, seeds, context)
            samples = self._check_samples(results, subject, request.group_id)
        if on_generated is not None:
            on_generated()
        group = SampleGroup(request.group_id, request.prompt, samples)
        return (await self.rewards.score([group], unshaped=not is_training))[0]

    async def groups(self, requests: Sequence[GroupRequest]) -> list[SampleGroup]:
        """Return the groups of all requests, in order; the first failure cancels the others."""
        return await gather_or_cancel([self.group(request) for request in requests])

    def metrics(self) -> list[Metric]:
        """Return metrics of the generate function and of engine usage since the last call."""
        metrics = self.generate.metrics() if isinstance(self.generate, Generator) else ()
        return [*metrics, *self.usage.drain()]

    def warnings(self) -> tuple[str, ...]:
        """Return warnings of the generate function since the last call."""
        return self.generate.warnings() if isinstance(self.generate, Generator) else ()

    async def close(self) -> None:
        """Release the resources of the generate function."""
        if isinstance(self.generate, Generator):
            await self.generate.close()

    def _check_samples(self, returned: object, subject: str, group_id: int) -> tuple[Sample, ...]:
        """Return the samples that a generate function has ``returned``.

        Raises ``UserCodeError`` if this is not a sequence of samples, is empty, or contains an invalid sample.
        """
        if isinstance(returned, Sequence):
            items = cast("Sequence[object]", returned)
            wrong_items = [item for item in items if not isinstance(item, Sample)]
            if items and not wrong_items:
                samples = tuple(cast("Sequence[Sample]", items))
                if problem := next(filter(None, (_problem(sample, group_id) for sample in samples)), ""):
                    raise UserCodeError(f"rollout.generate={self.generate_name} for {subject}: {problem}")
                return samples
            description = (
                f"a list with {wrong_items[0]!r:.80} ({type(wrong_items[0]).__name__})" if wrong_items else "no sample"
            )
        else:
            description = f"{returned!r:.80} ({type(returned).__name__})"
        raise UserCodeError(
            f"rollout.generate={self.generate_name} returned {description} for {subject}: it must return the samples of the group, "
            "at least one slime_like.types.Sample"
        )


def _problem(sample: Sample, group_id: int) -> str:
    """Describe an invalid field of a user's sample that training would not detect; return "" if there is none."""
    name = f"sample {sample.sample_id}"
    if sample.group_id != group_id:
        return f"{name} has group_id {sample.group_id}: give it context.group_id, here {group_id}"
    if sample.status not in UNTRAINED and any(version < 0 for version in sample.versions):
        return f"{name} has sampled tokens of weight version -1: give their span the version of their completion"
    return ""


class PauseGate:
    """Gate for the requests of many groups. Closing it aborts requests in flight and holds new requests back."""

    def __init__(self, no_engine_s: Callable[[], float] = lambda: 0.0) -> None:
        """``no_engine_s`` returns the total seconds during which no engine served, which ``shut_s`` leaves out."""
        self._no_engine_s = no_engine_s
        self._open = asyncio.Event()
        self._open.set()
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._shut_at: float | None = None
        self._shut_before_s = 0.0

    @property
    def shut_s(self) -> float:
        """Total seconds for which the gate has been closed while an engine served."""
        return self._shut_before_s + (0.0 if self._shut_at is None else self._serving_clock() - self._shut_at)

    def open(self) -> None:
        """Open the gate: waiting and new requests are sent."""
        self._shut_before_s, self._shut_at = self.shut_s, None
        self._open.set()

    async def shut(self, abort_all: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
        """Close the gate: hold new requests back and abort those in flight, which keep their sampled tokens.

        ``abort_all`` aborts the requests of all engines; it is called repeatedly until no request is in flight. Raises
        ``DeadlineExceeded`` if requests are still in flight at the deadline.
        """
        self._open.clear()
        self._shut_at = self._serving_clock() if self._shut_at is None else self._shut_at
        while self._num_inside:
            await abort_all()
            remaining_s = deadline.remaining(f"{self._num_inside} aborted requests")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(ABORT_AGAIN_S, remaining_s))

    @asynccontextmanager
    async def passage(self) -> AsyncGenerator[None]:
        """Wait until the gate is open, then run the block, which sends a request. ``shut`` waits for the end of the block."""
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

    def _serving_clock(self) -> float:
        """Return the seconds of a clock that stands still while no engine serves."""
        return time.monotonic() - self._no_engine_s()


class ResumableEngine:
    """``interfaces.Engine`` for one group that continues its completions after an abort or the loss of an engine."""

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
        """Total seconds for which the gate was closed or no engine served."""
        return self._gate.shut_s + self._pool.router.no_engine_s

    async def generate(self, token_ids: I32, seeds: Sequence[int], sampling: Sampling) -> Sequence[Completion]:
        """Return ``len(seeds)`` completions of one prompt, over as many requests as needed.

        ``finish`` is ``abort`` only if the engine ended a request that this run did not abort.
        Raises ``ConfigError`` if the completions are trained on and ``sampling`` differs from the run's distribution.
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
        """Send one request for all unfinished completions, unless the engine was withdrawn.

        Return False if the engine aborted one of them, although this run had not requested an abort.
        """
        engine = self._pool.router.serving_engine(self._assignment)
        if engine is None:  # the engine was withdrawn while the gate was closed
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
        """Sample and return further tokens of the completions ``indices``, and return whether this run may have aborted them."""
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


def sample_seeds(run_seed: int, stream: str, first_sample_id: int, num_samples: int) -> list[int]:
    """Return a seed in ``[0, 2**31 - 1)`` for each of ``num_samples`` samples of ``stream``, from ``first_sample_id`` on.

    ``stream`` is "train", or names a held-out dataset. A seed depends only on ``run_seed``, ``stream`` and the sample's id, so
    a resumed run draws the same seeds.
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
    """Return the settings that differ from the run's, as a dict from name to (requested value, run's value).

    A requested None stands for the run's value.
    """
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
