"""The rollout side of the circle in one object: prompts, engines, rewards, filters and what is left over.

Lives in a process of its own, so that collecting overlaps training when ``loop.max_staleness`` allows.
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
    """Everything the manager needs to know."""

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
    overlong: OverlongPenalty | None = None  # as the driver applies it before advantages
    baseline: str = "group"  # of advantages: group, batch or none; see LearningSignal
    pushes: bool = True  # weights of the trainer arrive; else an engine serves what it started with


@dataclass(frozen=True, slots=True)
class Collected:
    """What the trainer takes: whole groups, scored and filtered."""

    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds: when generation of this rollout began and ended
    stopped: float
    metrics: tuple[Metric, ...]
    warnings: tuple[RunWarning, ...] = ()
    recovered: tuple[Recovery, ...] = ()  # what was lost, as far as it has come back; the newest of one counts


def oldest_allowed(cfg: RolloutConfig, loop: LoopConfig) -> int:
    """Versions that a group which waited for a rollout may lag behind the trainer when it is trained on."""
    if not cfg.partial_rollout:
        return loop.max_staleness + 1
    return cfg.max_partial_staleness or loop.max_staleness + DEFAULT_PARTIAL_STALENESS


class RolloutManager:
    """Cursor, engines' clients, reward pool and buffer."""

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
        self._watch = HealthMonitor(self._pool)
        self._push = Push(self._pool, self._watch)
        self._rewards = RewardPool(spec.reward)
        self._generate = open_generator(spec.rollout)
        self._answers = GroupSampler(
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
        self._making = GroupCollector(cfg, sampling, bound, PromptQueue(source), self._answers, self._pool.abort_all)
        self._producer = self._new_producer(spec.first_rollout)
        self._starts: dict[int, RolloutState] = {}  # before the prompts of each rollout
        self._filtered: dict[int, FilterReport] = {}  # of rollouts that are made and not consumed
        self._leftover: tuple[SampleGroup, ...] = ()
        self._signal = LearningSignal(spec.baseline, spec.overlong)
        self._num_stale = 0
        self._probe: tuple[I32, ...] = ()
        self._version = -1

    # ---- collect -----------------------------------------------------------------------------------------------------
    async def collect(self, rollout_id: int) -> Collected:
        """The groups of one rollout, leftover of earlier ones first; whole groups that fill optimizer steps."""
        self._watch.start()
        produced = await self._producer.get(rollout_id)
        self._producer.forget(rollout_id)
        self._starts = {key: value for key, value in self._starts.items() if key > rollout_id}
        carried = self._young(self._leftover)
        split = split_leftover([*carried, *produced.groups], self._spec.samples_per_rollout, self._spec.loop.leftover)
        groups, self._leftover = split.used, split.carried
        if self._spec.reward.shuffle:
            groups = tuple(shuffle_rewards(groups, seed=self._spec.seed * 1_000_003 + rollout_id))
        self._remember_probe(groups)
        restarts, remade = self._pool.take_restart_counts()
        filtered = self._filtered.pop(rollout_id, FilterReport())
        advice = self._signal.observe(
            rollout_id, groups, len(self._leftover) - len(carried), filtered.summary, filtered.example
        )
        metrics = [
            *self._signal.metrics(),
            *self._source.metrics(),
            *filtered.metrics,
            *self._making.metrics(),
            *self._drain_stale(),
            *self._rewards.metrics(),
            *self._generate.metrics(),
            *self._answers.usage.drain(),
            Last("rollout/carried_groups", len(self._leftover)),
            Sum("rollout/dropped_samples", split.num_dropped),
            Sum("rollout/generated_groups", produced.num_generated),
            Sum("rollout/refills", produced.num_refills),
            Sum("rollout/engine_restarts", restarts),
            Sum("rollout/remade_groups", remade),
        ]
        others = (*self._rewards.warnings(), *self._generate.warnings(), *self._pool.news())
        warnings = (*advice, *map(RunWarning, others))
        recovered = self.last_recoveries()
        return Collected(groups, produced.started, produced.stopped, tuple(metrics), warnings, recovered)

    def _young(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Carried groups that one more rollout of waiting has not made too old."""
        young = [group for group in groups if group.oldest_version >= self._version - self._bound]
        self._num_stale += len(groups) - len(young)
        return young

    def _new_producer(self, first: int) -> Producer:
        loop = self._spec.loop
        return Producer(self._make, first=first, last=loop.num_rollout, max_staleness=loop.max_staleness)

    async def _make(self, rollout_id: int) -> Produced:
        self._starts[rollout_id] = self._making.state()
        started = now()
        filled = await self._making.make(rollout_id)
        self._filtered[rollout_id] = self._making.filters.report()
        return Produced(rollout_id, filled.groups, started, now(), filled.num_generated, filled.num_refills)

    def _drain_stale(self) -> list[Metric]:
        stale, self._num_stale = self._num_stale, 0
        return [Sum("rollout/dropped_groups/stale", stale)] if self._spec.loop.leftover == "carry" else []

    # ---- evaluate ----------------------------------------------------------------------------------------------------
    async def evaluate(self) -> Evaluated:
        """Answer every held-out dataset under the weights the engines hold now, and score the answers."""
        self._watch.start()
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
            groups = await self._answers.groups(
                [GroupRequest(prompt, i, n, sampling, f"eval {heldout.name}") for i, prompt in enumerate(prompts)]
            )
            metrics += eval_metrics(heldout.name, groups)
            if self._spec.evaluation.save_answers:
                answers += eval_answers(heldout.name, groups)
        return Evaluated((*metrics, *self._rewards.metrics()), tuple(answers))

    # ---- weights -----------------------------------------------------------------------------------------------------
    async def begin_push(self) -> tuple[str, ...]:
        """Pause every engine, in-flight requests kept, and open its weight update; the names of those that take part.

        In a deterministic run nothing is in flight: which tokens a push would find sampled is a matter of time. Only
        what waits for an engine to come back can not be waited for: that engine waits for this push.
        """
        self._watch.start()
        if self._spec.deterministic:
            await _first(self._producer.settled(), self._pool.router.empty())
        return await self._push.begin()

    async def commit_push(self, version: int) -> None:
        """Close the update on every engine: fails unless each of its parameters was written. KV of old weights is flushed."""
        await self._push.commit(version)
        self._version = version
        await self._push.resume(version)

    async def skip_push(self, version: int) -> None:
        """The fault of ``weights.debug_skip_push_at``: claim a version that was never sent."""
        self._version = version

    async def abort_push(self) -> None:
        """After a failed push: let go of the engines' locks so that they can be stopped, or pushed to again."""
        await self._push.abort()

    async def starved(self) -> None:
        """Return when no engine serves and a restarted one waits for weights."""
        await self._pool.starved()

    def last_recoveries(self) -> tuple[Recovery, ...]:
        """Of the engines that were lost, and a reward server that was, what ``Collected`` has not told."""
        return (*self._pool.take_recoveries(), *self._rewards.take_recoveries())

    def lose_reward_server(self, seconds: float) -> None:
        """See ``RewardPool.lose_server``."""
        self._rewards.lose_server(seconds)

    # ---- probe -------------------------------------------------------------------------------------------------------
    async def probe(self) -> tuple[ProbeScores, ...]:
        """A few stored sequences, scored and continued by every engine. Raises ``EngineLost`` where none is left."""
        if not self._probe:
            self._remember_probe([])
        if not self._probe:  # prompts of one token have nothing to score: the first rollout will
            return ()
        asked = await asyncio.gather(*(self._score(slot) for slot in self._pool.slots if not slot.down))
        if not (found := [scores for scores in asked if scores is not None]):
            raise EngineLost(f"no engine is left that took the weights of version {self._version}")
        return tuple(found)

    async def _score(self, slot: EngineSlot) -> ProbeScores | None:
        """What one engine thinks of the probe's sequences; None where it does not serve, or is lost meanwhile."""
        engine, spec = slot.client, self._spec
        if engine not in self._pool.router.engines:
            return None
        try:
            asked = probe.ask(engine, self._version, self._probe, spec.temperature, spec.max_context_len)
            return await unless_lost(slot.lost, engine, asked)
        except (EngineError, DeadlineExceeded) as error:
            await self._pool.failed(slot, engine, error)
            return None

    def _remember_probe(self, groups: Sequence[SampleGroup]) -> None:
        """Keep the first sequences of the newest rollout; before the first one, prompts."""
        wanted = self._spec.probe_sequences
        sequences = [group.samples[0].token_ids for group in groups if group.samples and self._can_score(group)][
            :wanted
        ]
        if not sequences and not self._probe:
            state = self._source.state()
            sequences = [p.token_ids for p in self._source.next(wanted) if len(p.token_ids) > 1]
            self._source.load_state(state)
        if sequences:
            self._probe = tuple(np.asarray(ids, dtype=np.int32) for ids in sequences)

    def _can_score(self, group: SampleGroup) -> bool:
        """An engine scores what leaves room for one more token, and has something to score."""
        return 1 < len(group.samples[0].token_ids) < self._spec.max_context_len

    # ---- state -------------------------------------------------------------------------------------------------------
    def save_state(self, next_rollout: int, leftover: Path) -> dict[str, Any]:
        """What makes rollout ``next_rollout`` again: the cursor before its prompts, and groups no step has trained on.

        Rollouts in flight are made anew, with the same prompts and seeds; what an earlier rollout left unfinished goes on
        where that rollout stopped it. In a deterministic run they are whole, and were sampled from weights that no engine
        will have again: they are written as well.
        """
        save_groups(leftover, self._leftover)
        made = self._producer.waiting() if self._spec.deterministic else []
        for produced in made:
            save_groups(made_path(leftover, produced.rollout_id), produced.groups)
        first = made[-1].rollout_id + 1 if made else next_rollout
        state = self._starts.get(first) or self._making.state()
        in_flight = state.in_flight()
        if in_flight:
            save_groups(in_flight_path(leftover), in_flight)
        return {
            "next_rollout": next_rollout,
            "cursor": state.cursor,
            "in_flight": len(in_flight),
            "made": [asdict(replace(produced, groups=())) for produced in made],
        }

    def load_state(self, state: Mapping[str, Any], leftover: Path) -> None:
        """Continue where ``state`` was taken."""
        self._source.load_state(state["cursor"])
        self._leftover = load_groups(leftover)
        self._producer = self._new_producer(int(state["next_rollout"]))
        self._producer.restore(
            [
                Produced(**(made | {"groups": load_groups(made_path(leftover, made["rollout_id"]))}))
                for made in state.get("made", [])
            ]
        )
        if state.get("in_flight"):
            self._making.restore(RolloutState.of(state["cursor"], load_groups(in_flight_path(leftover))))

    async def stop(self) -> None:
        """Cancel what is in flight, close the generate function and stop the reward pool."""
        await self._producer.stop()
        await self._making.close()
        await self._generate.close()
        await self._pool.stop()
        await self._rewards.stop()


async def _first(*waits: Coroutine[Any, Any, None]) -> None:
    """Wait for whichever ends first."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
