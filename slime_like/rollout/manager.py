"""Rollout manager: prompts, engines, rewards and filters behind one object.

The manager runs in its own process, so that collection overlaps training if ``loop.max_staleness`` allows it. With
``rollout.num_managers`` > 1, each manager has a ``ManagerShare`` of prompts and engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.dump import load_groups
from slime_like.data.faults import Recovery
from slime_like.data.heldout import eval_sets
from slime_like.data.routing import RoutingShape
from slime_like.data.share import SINGLE, ManagerShare, share_of_source
from slime_like.data.tokenizer import open_tokenizer, text_decoder
from slime_like.errors import ConfigError
from slime_like.interfaces import DataSource, EngineAddress, Sampling
from slime_like.metrics.types import Sum
from slime_like.reward.pool import RewardPool
from slime_like.rollout.collect.collector import GroupCollector, RolloutProducer
from slime_like.rollout.collect.over_sampling import OverSamplingCollector, max_group_staleness
from slime_like.rollout.collect.sampler import GroupRequest, GroupSampler, open_generate
from slime_like.rollout.collect.state import (
    GeneratedRollout,
    RolloutState,
    generated_path,
    in_flight_path,
    write_groups,
)
from slime_like.rollout.generate.evaluate import ManagerEvaluation, PromptResult, prompt_result
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.engine_slot import EngineSupervisor
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.rollout.pool.kv_usage import kv_metrics
from slime_like.rollout.pool.memory import PoolMemory
from slime_like.rollout.pool.probe import EngineProbe, ProbeScores
from slime_like.rollout.pool.resize import EngineFactory, PoolResizer
from slime_like.rollout.pool.router import RequestCounts
from slime_like.rollout.pool.weight_update import EngineWeightUpdate
from slime_like.rollout.selection import ManagerRollout
from slime_like.types import Prompt
from slime_like.util.concurrency import first_of


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
    first_rollout: int
    deterministic: bool
    routing: RoutingShape | None = None  # shape of the routed experts that engines return; None if they return none
    releases_memory: bool = False  # the engines release memory while the trainer needs it
    has_fixed_gpus: bool = False  # weights.transport=ipc: an engine needs trainer ranks on its GPUs
    receives_pushes: bool = True  # True: engines receive the trainer's weights; False: they keep their initial weights
    share: ManagerShare = SINGLE  # prompts, groups and engines of this manager


class RolloutManager:
    """Owner of the data cursor, engine clients and reward pool."""

    def __init__(
        self,
        spec: ManagerSpec,
        source: DataSource,
        heldout: Mapping[str, Sequence[Prompt]],
        supervisors: Sequence[EngineSupervisor],
        factory: EngineFactory | None = None,
    ) -> None:
        """``supervisors`` contains the engines of this manager's share.

        ``source`` and ``heldout`` contain the prompts of all managers. ``factory`` adds and removes engines; None if
        the number of engines cannot be changed.
        """
        self._spec = spec
        self._source = source = share_of_source(source, spec.share)
        self._heldout = heldout
        self._pool = EnginePool(supervisors, spec.health, receives_pushes=spec.receives_pushes)
        self._monitor = HealthMonitor(self._pool)
        self._update = EngineWeightUpdate(self._pool)
        self._memory = PoolMemory(self._pool)
        self._resizer = None if factory is None else PoolResizer(self._pool, self._monitor, factory, spec.share)
        self._rewards = RewardPool(spec.reward)
        self._usage = RequestCounts(len(supervisors))
        tokenizer = open_tokenizer(spec.tokenizer_path)
        self._sampler = GroupSampler(
            pool=self._pool,
            rewards=self._rewards,
            generate=open_generate(spec.rollout),
            generate_name=spec.rollout.generate,
            tokenizer=tokenizer,
            decode=text_decoder(tokenizer),
            chat_template_kwargs=spec.chat_template_kwargs,
            max_context_len=spec.max_context_len,
            seed=spec.seed,
            usage=self._usage,
            trains=spec.receives_pushes,
        )
        self._collector = self._new_collector()
        self._producer = self._new_producer(spec.first_rollout)
        self._probe = EngineProbe(
            self._pool,
            source,
            num_sequences=spec.probe_sequences,
            temperature=spec.temperature,
            max_context_len=spec.max_context_len,
        )
        self._version = -1

    # ---- collect -----------------------------------------------------------------------------------------------------
    async def collect(self, rollout_id: int) -> ManagerRollout:
        """Return this manager's groups of one rollout once it is complete, with metrics and messages.

        Call it once per rollout, in order: the manager then forgets the rollout.
        """
        self._monitor.start()
        generated = await self._producer.get(rollout_id)
        self._producer.forget(rollout_id)
        self._collector.forget(rollout_id)
        self._probe.remember(generated.groups)
        num_restarts, num_moved_groups = self._pool.take_restart_counts()
        kv_usage, kv_warnings = await kv_metrics(self._pool)
        metrics = [
            *self._source.metrics(),
            *generated.filtered.metrics,
            *self._collector.metrics(),
            *self._rewards.metrics(),
            *self._sampler.metrics(),
            *kv_usage,
            Sum("rollout/generated_groups", generated.num_generated),
            Sum("rollout/refills", generated.num_refills),
            Sum("rollout/engine_restarts", num_restarts),
            Sum("rollout/remade_groups", num_moved_groups),
        ]
        messages = (*self._rewards.warnings(), *self._sampler.warnings(), *self._pool.drain_messages(), *kv_warnings)
        return ManagerRollout(
            groups=generated.groups,
            started=generated.started,
            stopped=generated.stopped,
            version=self._version,
            metrics=tuple(metrics),
            messages=messages,
            recoveries=self.last_recoveries(),
            drop_summary=generated.filtered.summary,
            example=generated.filtered.example,
        )

    def _new_collector(self) -> GroupCollector:
        spec, cfg = self._spec, self._spec.rollout
        sampling = Sampling(spec.temperature, cfg.max_response_len, cfg.top_p, cfg.top_k, spec.stop_token_ids)
        if cfg.over_sampling_batch_size is None:
            return GroupCollector(cfg, sampling, self._source, self._sampler, spec.share)
        # Nothing becomes stale without pushes.
        max_staleness = max_group_staleness(cfg, spec.loop) if spec.receives_pushes else math.inf
        return OverSamplingCollector(cfg, sampling, self._source, self._sampler, max_staleness, spec.share)

    def _new_producer(self, first: int) -> RolloutProducer:
        loop = self._spec.loop
        return RolloutProducer(
            self._collector.generate, first=first, last=loop.num_rollout, max_staleness=loop.max_staleness
        )

    # ---- evaluate ----------------------------------------------------------------------------------------------------
    async def evaluate(self) -> ManagerEvaluation:
        """Sample and score responses to this manager's prompts of all held-out datasets, under the engines' current weights."""
        self._monitor.start()
        results: dict[str, tuple[PromptResult, ...]] = {}
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
                [
                    GroupRequest(prompt, i, n, sampling, f"eval {heldout.name}")
                    for i, prompt in self._spec.share.of(list(enumerate(prompts)))
                ]
            )
            saves = self._spec.evaluation.save_answers
            results[heldout.name] = tuple(prompt_result(heldout.name, group, with_answers=saves) for group in groups)
        return ManagerEvaluation(results, self._rewards.metrics())

    async def enter_phase(self, phase: str) -> None:
        """Release engine memory that ``phase`` (``config.schema.residency``) does not need; in phase collect, restore it.

        An engine whose weights were released stays paused until the next push; see ``PoolMemory.enter``.
        """
        self._monitor.start()
        await self._memory.enter(phase)

    # ---- weights -----------------------------------------------------------------------------------------------------
    async def begin_push(self) -> tuple[EngineAddress, ...]:
        """Pause every reachable engine without ending its requests, and open its weight update; return the engines' addresses.

        A deterministic run first waits until no request is in flight, because timing would otherwise decide which tokens are
        sampled before the push. It does not wait if no engine serves: the groups in flight then wait for an engine, and the
        engines wait for this push.
        """
        self._monitor.start()
        if self._spec.deterministic:
            await first_of(self._producer.wait_until_idle(), self._pool.router.wait_until_none_serves())
        return await self._update.begin()

    async def commit_push(self, version: int) -> int:
        """Close the update on every engine that takes part, flush its KV cache and resume decoding.

        Return the number of added engines that have the weights, but get no groups until the probe has checked them and
        ``admit_proven`` is called. Raises ``EngineError`` if an engine did not receive all its parameters or no engine remains,
        ``WeightSyncError`` if an engine reports another version, or the errors of ``EngineWeightUpdate.begin``.
        """
        await self._update.commit(version)
        self._version = version
        await self._update.resume(version)
        return 0 if self._resizer is None else self._resizer.num_unproven()

    async def admit_proven(self) -> None:
        """Let groups be assigned to added engines. Call it after the probe has compared these engines with the trainer."""
        if self._resizer is not None:
            self._resizer.admit_proven(self._version)

    async def resize_engines(self, num_engines: int) -> str:
        """Change the number of engines to this manager's share of ``num_engines``; return a description of the change.

        Added engines start in the background. Raises ``ConfigError`` if the number cannot be changed.
        """
        share_size = self._spec.share.size(num_engines)
        if self._resizer is None:
            raise ConfigError(
                f"engines={num_engines}: the number of engines cannot be changed, because this rollout manager has no engine factory"
            )
        if self._spec.releases_memory:
            raise ConfigError(
                f"engines={num_engines}: with placement.offload_rollout=true the number of engines cannot be changed, because the "
                "start of an engine would need memory that the trainer has"
            )
        if self._spec.has_fixed_gpus and share_size > self._resizer.num_engines:
            raise ConfigError(
                f"engines={num_engines}: with weights.transport=ipc no engine can be added, because it would share no GPU with a trainer "
                "rank; set weights.transport=tensor before the run is started"
            )
        change = await self._resizer.resize(share_size)
        self._usage.num_engines = share_size
        return change

    async def skip_push(self, version: int) -> None:
        """Inject the fault of ``weights.debug_skip_push_at``: report a version whose weights were never sent."""
        self._version = version

    async def abort_push(self) -> None:
        """Resume decoding after a failed push. Engines with an uncommitted update stay paused until the next push."""
        await self._update.abort()

    async def wait_until_push_needed(self) -> None:
        """Wait until no engine serves although a push can reach at least one, or until an error ends the run."""
        await self._pool.wait_until_push_needed()

    def last_recoveries(self) -> tuple[Recovery, ...]:
        """Return the engine recoveries that began or changed since the last call. ``collect`` makes such calls too.

        Also return a record of each injected outage of the reward server that failed a request. Every call returns this
        record again, until one has returned it complete.
        """
        return (*self._pool.take_recoveries(), *self._rewards.take_recoveries())

    def block_reward_server(self, seconds: float) -> None:
        """Make the reward server unreachable for ``seconds``; see ``RewardPool.block_server``."""
        self._rewards.block_server(seconds)

    async def probe(self) -> tuple[ProbeScores, ...]:
        """Return every engine's scores and continuations of the probe sequences; see ``EngineProbe.scores``."""
        return await self._probe.scores(self._version)

    # ---- state -------------------------------------------------------------------------------------------------------
    async def save_state(self, next_rollout: int, base: Path) -> dict[str, Any]:
        """Return the state from which ``next_rollout`` is reproduced: a data cursor, and a description of saved groups.

        The saved groups have not been trained on. They are written to files in the folder of ``base``, and the names of these
        files begin with the stem of ``base``. Raises ``CheckpointError`` if a file cannot be written.

        Unless the run is deterministic, the cursor is the one before ``next_rollout``: a resumed run generates rollouts in flight
        again, with the same prompts and seeds, and continues groups that an earlier rollout left unfinished. In a deterministic
        run, rollouts in flight are complete at this point, or have failed. Complete ones are saved too, because the weights that
        generated them will not be available, and the cursor is the one after them. A failed one is generated again, with the
        checkpoint's weights.
        """
        completed = self._producer.completed_rollouts() if self._spec.deterministic else []
        state = self._collector.state_before(completed[-1].rollout_id + 1 if completed else next_rollout)
        in_flight = state.in_flight()
        for generated in completed:
            write_groups(generated_path(base, generated.rollout_id), generated.groups)
        if in_flight:
            write_groups(in_flight_path(base), in_flight)
        return {
            "next_rollout": next_rollout,
            "cursor": state.cursor,
            "in_flight": len(in_flight),
            "made": [generated.record() for generated in completed],
        }

    async def load_state(self, state: Mapping[str, Any], base: Path) -> None:
        """Continue from a ``state`` that ``save_state`` returned for the same ``base``. Call it before the first ``collect``."""
        self._source.load_state(state["cursor"])
        self._producer = self._new_producer(int(state["next_rollout"]))
        self._producer.restore(
            [
                GeneratedRollout(**(record | {"groups": load_groups(generated_path(base, record["rollout_id"]))}))
                for record in state.get("made", [])
            ]
        )
        if state.get("in_flight"):
            self._collector.restore(RolloutState.from_groups(state["cursor"], load_groups(in_flight_path(base))))

    async def stop(self) -> None:
        """Cancel unfinished groups and engine starts; close the generate function and the engine clients; stop the reward pool.

        Every step runs even if another one fails.
        """
        async with AsyncExitStack() as teardown:  # callbacks run in reverse order
            teardown.push_async_callback(self._rewards.stop)
            teardown.push_async_callback(self._pool.stop)
            if self._resizer is not None:
                teardown.push_async_callback(self._resizer.stop)
            teardown.push_async_callback(self._sampler.close)
            teardown.push_async_callback(self._collector.close)
            teardown.push_async_callback(self._producer.stop)
