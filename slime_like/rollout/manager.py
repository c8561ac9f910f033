"""Rollout manager: prompts, engines, rewards, filters and leftover groups behind one object.

Lives in its own process, so that collection overlaps training if ``loop.max_staleness`` allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.dump import load_groups, save_groups
from slime_like.data.faults import Recovery
from slime_like.data.heldout import eval_sets
from slime_like.data.leftover import split_leftover
from slime_like.data.overlong import OverlongPenalty
from slime_like.data.tokenizer import open_tokenizer
from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.interfaces import DataSource, Sampling
from slime_like.metrics.types import Last, Metric, RunWarning, Sum
from slime_like.reward.pool import RewardPool
from slime_like.reward.shuffle import shuffle_rewards
from slime_like.rollout.collect.collector import GroupCollector
from slime_like.rollout.collect.group_filters import FilterReport
from slime_like.rollout.collect.learning_signal import LearningSignal
from slime_like.rollout.collect.producer import Produced, Producer, now
from slime_like.rollout.collect.prompt_queue import PromptQueue
from slime_like.rollout.collect.sampler import GroupRequest, GroupSampler
from slime_like.rollout.collect.state import RolloutState, in_flight_path, made_path
from slime_like.rollout.collect.usage import Usage
from slime_like.rollout.generate.evaluate import EvalAnswer, Evaluated, eval_answers, eval_metrics
from slime_like.rollout.generate.generators import open_generator
from slime_like.rollout.pool import probe
from slime_like.rollout.pool.engine_pool import EnginePool, EngineSlot, EngineSupervisor, unless_lost
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.rollout.pool.probe import ProbeScores
from slime_like.rollout.pool.push import Push
from slime_like.types import I32, Prompt, SampleGroup

DEFAULT_PARTIAL_STALENESS = 4  # versions beyond loop.max_staleness


@dataclass(frozen=True, slots=True)
class ManagerSpec:
    """Settings of the manager."""

    rollout: RolloutConfig
    reward: RewardConfig
    evaluation: EvalConfig
    loop: LoopConfig
    health: HealthConfig
    tokenizer_path: str
    max_context_len: int
    stop_token_ids: tuple[int, ...]
    chat_template_kwargs: Mapping[str, Any]
    temperature: float
    seed: int
    probe_sequences: int
    samples_per_rollout: int
    first_rollout: int
    deterministic: bool
    overlong: OverlongPenalty | None = None  # applied by the driver before advantages
    baseline: str = "group"  # of advantages: group, batch or none; see LearningSignal
    pushes: bool = True  # engines receive the trainer's weights; otherwise they serve those they started with


@dataclass(frozen=True, slots=True)
class Collected:
    """Input of the trainer for one rollout: complete groups, scored and filtered."""

    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds: when generation of this rollout began and ended
    stopped: float
    metrics: tuple[Metric, ...]
    warnings: tuple[RunWarning, ...] = ()
    recovered: tuple[Recovery, ...] = ()  # new or changed since the last rollout; a later entry replaces an earlier one


def oldest_allowed(cfg: RolloutConfig, loop: LoopConfig) -> int:
    """Return the number of versions that a group may lag behind the trainer when it is trained on."""
    if not cfg.partial_rollout:
        return loop.max_staleness + 1
    return cfg.max_partial_staleness or loop.max_staleness + DEFAULT_PARTIAL_STALENESS


class RolloutManager:
    """Owner of the data cursor, engine clients, reward pool and leftover groups."""

    def __init__(
        self,
        spec: ManagerSpec,
        source: DataSource,
        heldout: Mapping[str, Sequence[Prompt]],
        supervisors: Sequence[EngineSupervisor],
    ) -> None:
        self._spec = spec
        self._source = source
        self._heldout = heldout
        self._pool = EnginePool(supervisors, spec.health, pushed=spec.pushes)
        self._monitor = HealthMonitor(self._pool)
        self._push = Push(self._pool, self._monitor)
        self._rewards = RewardPool(spec.reward)
        self._generate = open_generator(spec.rollout)
        self._sampler = GroupSampler(
            router=self._pool.router,
            rewards=self._rewards,
            generate=self._generate,
            generate_name=spec.rollout.generate,
            tokenizer=open_tokenizer(spec.tokenizer_path),
            chat_template_kwargs=spec.chat_template_kwargs,
            max_context_len=spec.max_context_len,
            seed=spec.seed,
            usage=Usage(len(supervisors)),
            trains=spec.pushes,
        )
        cfg = spec.rollout
        sampling = Sampling(spec.temperature, cfg.max_response_len, cfg.top_p, cfg.top_k, spec.stop_token_ids)
        self._bound = oldest_allowed(cfg, spec.loop)
        bound = self._bound if spec.pushes else None
        self._collector = GroupCollector(cfg, sampling, bound, PromptQueue(source), self._sampler, self._pool.abort_all)
        self._producer = self._new_producer(spec.first_rollout)
        self._starts: dict[int, RolloutState] = {}  # before the prompts of each rollout
        self._filtered: dict[int, FilterReport] = {}  # of rollouts that are complete and not consumed
        self._leftover: tuple[SampleGroup, ...] = ()
        self._signal = LearningSignal(spec.baseline, spec.overlong)
        self._num_stale = 0
        self._probe: tuple[I32, ...] = ()
        self._version = -1

    # ---- collect -----------------------------------------------------------------------------------------------------
    async def collect(self, rollout_id: int) -> Collected:
        """Return complete groups of one rollout that fill optimizer steps, leftover of earlier rollouts first."""
        self._monitor.start()
        produced = await self._producer.get(rollout_id)
        self._producer.forget(rollout_id)
        self._starts = {key: value for key, value in self._starts.items() if key > rollout_id}
        carried = self._young(self._leftover)
        split = split_leftover([*carried, *produced.groups], self._spec.samples_per_rollout, self._spec.loop.leftover)
        groups, self._leftover = split.used, split.carried
        if self._spec.reward.shuffle:
            groups = tuple(shuffle_rewards(groups, seed=self._spec.seed * 1_000_003 + rollout_id))
        self._remember_probe(groups)
        num_restarts, num_remade = self._pool.take_restart_counts()
        filtered = self._filtered.pop(rollout_id, FilterReport())
        advice = self._signal.observe(
            rollout_id, groups, len(self._leftover) - len(carried), filtered.summary, filtered.example
        )
        metrics = [
            *self._signal.metrics(),
            *self._source.metrics(),
            *filtered.metrics,
            *self._collector.metrics(),
            *self._drain_stale(),
            *self._rewards.metrics(),
            *self._generate.metrics(),
            *self._sampler.usage.drain(),
            Last("rollout/carried_groups", len(self._leftover)),
            Sum("rollout/dropped_samples", split.num_dropped),
            Sum("rollout/generated_groups", produced.num_generated),
            Sum("rollout/refills", produced.num_refills),
            Sum("rollout/engine_restarts", num_restarts),
            Sum("rollout/remade_groups", num_remade),
        ]
        messages = (*self._rewards.warnings(), *self._generate.warnings(), *self._pool.news())
        warnings = (*advice, *map(RunWarning, messages))
        recovered = self.last_recoveries()
        return Collected(groups, produced.started, produced.stopped, tuple(metrics), warnings, recovered)

    def _young(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return the carried groups that are still within the staleness bound."""
        young = [group for group in groups if group.oldest_version >= self._version - self._bound]
        self._num_stale += len(groups) - len(young)
        return young

    def _new_producer(self, first: int) -> Producer:
        loop = self._spec.loop
        return Producer(self._make, first=first, last=loop.num_rollout, max_staleness=loop.max_staleness)

    async def _make(self, rollout_id: int) -> Produced:
        self._starts[rollout_id] = self._collector.state()
        started = now()
        filled = await self._collector.make(rollout_id)
        self._filtered[rollout_id] = self._collector.filters.report()
        return Produced(rollout_id, filled.groups, started, now(), filled.num_generated, filled.num_refills)

    def _drain_stale(self) -> list[Metric]:
        stale, self._num_stale = self._num_stale, 0
        return [Sum("rollout/dropped_groups/stale", stale)] if self._spec.loop.leftover == "carry" else []

    # ---- evaluate ----------------------------------------------------------------------------------------------------
    async def evaluate(self) -> Evaluated:
        """Answer every held-out dataset under the engines' current weights, and score the answers."""
        self._monitor.start()
        metrics: list[Metric] = []
        answers: list[EvalAnswer] = []
        for heldout in eval_sets(self._spec.evaluation):
            sampling = Sampling(
                temperature=heldout.temperature,
                max_new_tokens=heldout.max_response_len or self._spec.rollout.max_response_len,
                top_p=heldout.top_p,
                top_k=heldout.top_k,
                stop_token_ids=self._spec.stop_token_ids,
            )
            prompts, n = self._heldout[heldout.name], heldout.n_samples_per_prompt
            groups = await self._sampler.groups(
                [GroupRequest(prompt, i, n, sampling, f"eval {heldout.name}") for i, prompt in enumerate(prompts)]
            )
            metrics += eval_metrics(heldout.name, groups)
            if self._spec.evaluation.save_answers:
                answers += eval_answers(heldout.name, groups)
        return Evaluated((*metrics, *self._rewards.metrics()), tuple(answers))

    # ---- weights -----------------------------------------------------------------------------------------------------
    async def begin_push(self) -> tuple[str, ...]:
        """Pause every engine, keep its requests, and open its weight update; return the names of those taking part.

        In a deterministic run nothing may be in flight, since timing would decide which tokens the push finds sampled. The
        exception is a group that waits for an engine to restart: that engine waits for this push.
        """
        self._monitor.start()
        if self._spec.deterministic:
            await _first(self._producer.settled(), self._pool.router.empty())
        return await self._push.begin()

    async def commit_push(self, version: int) -> None:
        """Close the update on every engine: fails unless each of its parameters was written. KV of old weights is flushed."""
        await self._push.commit(version)
        self._version = version
        await self._push.resume(version)

    async def skip_push(self, version: int) -> None:
        """Inject the fault of ``weights.debug_skip_push_at``: claim a version that was never sent."""
        self._version = version

    async def abort_push(self) -> None:
        """After a failed push, release the engines' locks, so that they can be stopped or pushed to again."""
        await self._push.abort()

    async def starved(self) -> None:
        """Return when no engine serves and a restarted one waits for weights."""
        await self._pool.starved()

    def last_recoveries(self) -> tuple[Recovery, ...]:
        """Return recoveries of engines and reward server that no ``Collected`` has reported."""
        return (*self._pool.take_recoveries(), *self._rewards.take_recoveries())

    def lose_reward_server(self, seconds: float) -> None:
        """See ``RewardPool.lose_server``."""
        self._rewards.lose_server(seconds)

    # ---- probe -------------------------------------------------------------------------------------------------------
    async def probe(self) -> tuple[ProbeScores, ...]:
        """Return scores and continuations of the probe sequences by every engine. Raises ``EngineLost`` if none is left."""
        if not self._probe:
            self._remember_probe([])
        if not self._probe:  # one-token prompts have nothing to score; the first rollout will
            return ()
        results = await asyncio.gather(*(self._score(slot) for slot in self._pool.slots if not slot.down))
        if not (probe_scores := [scores for scores in results if scores is not None]):
            raise EngineLost(f"no engine is left that took the weights of version {self._version}")
        return tuple(probe_scores)

    async def _score(self, slot: EngineSlot) -> ProbeScores | None:
        """Return one engine's scores of the probe sequences; None if it does not serve or is lost during the call."""
        engine, spec = slot.client, self._spec
        if engine not in self._pool.router.engines:
            return None
        try:
            request = probe.ask(engine, self._version, self._probe, spec.temperature, spec.max_context_len)
            return await unless_lost(slot.lost, engine, request)
        except (EngineError, DeadlineExceeded) as error:
            await self._pool.failed(slot, engine, error)
            return None

    def _remember_probe(self, groups: Sequence[SampleGroup]) -> None:
        """Keep the first sequences of the newest rollout as probe; before the first rollout, prompts."""
        num_sequences = self._spec.probe_sequences
        sequences = [group.samples[0].token_ids for group in groups if group.samples and self._can_score(group)][
            :num_sequences
        ]
        if not sequences and not self._probe:
            state = self._source.state()
            sequences = [p.token_ids for p in self._source.next(num_sequences) if len(p.token_ids) > 1]
            self._source.load_state(state)
        if sequences:
            self._probe = tuple(np.asarray(ids, dtype=np.int32) for ids in sequences)

    def _can_score(self, group: SampleGroup) -> bool:
        """Return whether a group's first sample has tokens to score and leaves space for one more token."""
        return 1 < len(group.samples[0].token_ids) < self._spec.max_context_len

    # ---- state -------------------------------------------------------------------------------------------------------
    def save_state(self, next_rollout: int, leftover: Path) -> dict[str, Any]:
        """Return the state that reproduces rollout ``next_rollout``: the cursor before its prompts, and untrained groups.

        Rollouts in flight are generated again with the same prompts and seeds; groups that an earlier rollout left unfinished
        continue where that rollout stopped them. In a deterministic run they are complete and were sampled from weights that
        no engine will have again, so they are saved too.
        """
        save_groups(leftover, self._leftover)
        completed = self._producer.waiting() if self._spec.deterministic else []
        for produced in completed:
            save_groups(made_path(leftover, produced.rollout_id), produced.groups)
        first = completed[-1].rollout_id + 1 if completed else next_rollout
        state = self._starts.get(first) or self._collector.state()
        in_flight = state.in_flight()
        if in_flight:
            save_groups(in_flight_path(leftover), in_flight)
        return {
            "next_rollout": next_rollout,
            "cursor": state.cursor,
            "in_flight": len(in_flight),
            "made": [asdict(replace(produced, groups=())) for produced in completed],
        }

    def load_state(self, state: Mapping[str, Any], leftover: Path) -> None:
        """Continue from a saved ``state``."""
        self._source.load_state(state["cursor"])
        self._leftover = load_groups(leftover)
        self._producer = self._new_producer(int(state["next_rollout"]))
        self._producer.restore(
            [
                Produced(**(record | {"groups": load_groups(made_path(leftover, record["rollout_id"]))}))
                for record in state.get("made", [])
            ]
        )
        if state.get("in_flight"):
            self._collector.restore(RolloutState.of(state["cursor"], load_groups(in_flight_path(leftover))))

    async def stop(self) -> None:
        """Cancel requests in flight, close the generate function and stop the reward pool."""
        await self._producer.stop()
        await self._collector.close()
        await self._generate.close()
        await self._pool.stop()
        await self._rewards.stop()


async def _first(*waits: Coroutine[Any, Any, None]) -> None:
    """Wait for the first of ``waits``, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
