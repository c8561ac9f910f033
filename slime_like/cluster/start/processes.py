"""Start the processes of a run in order, and stop them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from slime_like.algo.advantage import bind_group_advantage
from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.transport import IPC
from slime_like.cluster.run.chaos import Chaos, report_lines
from slime_like.cluster.run.checkpoints import Checkpoints
from slime_like.cluster.run.control import Control
from slime_like.cluster.run.residency import EngineStates, Residency, ResidentRollout, ResidentTrainer, pushes_within
from slime_like.cluster.run.rollouts import (
    DemonstrationRollout,
    EngineRollout,
    ManagerGroup,
    ReplayRollout,
    RolloutSource,
)
from slime_like.cluster.run.stop import StopRequest
from slime_like.cluster.run.sync import EngineSync, NoSync, Sync
from slime_like.cluster.run.training_run import Run
from slime_like.cluster.start.inputs import RunInputs
from slime_like.cluster.start.node_paths import check_node_paths
from slime_like.cluster.start.placement import Placement
from slime_like.cluster.start.progress import Progress
from slime_like.cluster.start.resume import checkpoint_folder
from slime_like.cluster.start.selection import open_selection, overlong_penalty
from slime_like.cluster.start.shared_folder import find_separate_nodes
from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.calls import call, put, wait_all, wait_one
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_starter import EngineTemplate
from slime_like.cluster.workers.multi_role_trainer import MultiRoleTrainer
from slime_like.cluster.workers.no_trainer import FrozenTrainer
from slime_like.cluster.workers.role_group import RoleGroup
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.cluster.workers.trainer_group import TrainerGroup, connect
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.residency import STEP
from slime_like.config.schema.resolved import CriticSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.data.assemble import AssembleSpec
from slime_like.data.routing import RoutingShape
from slime_like.errors import DeadlineExceeded, SlimeLikeError, WorkerError
from slime_like.interfaces import EngineAddress, Trainer
from slime_like.metrics.drift import DriftWatch
from slime_like.metrics.sinks import SinkGroup
from slime_like.metrics.spans import Spans
from slime_like.printable import visible
from slime_like.rollout.manager import ManagerSpec
from slime_like.util.deadline import Deadline
from slime_like.weight_sync import manifest

REPORT_S = 5.0
POST_MORTEM_S = 20.0  # longer than EngineServer.cause_of_death waits for a dying process


@dataclass(slots=True)
class Cluster:
    """Owner of the processes that one run has started so far."""

    cfg: TrainConfig
    plan: Plan
    run_dir: Path
    progress: Progress
    say: Callable[[str], None]  # prints a line
    placement: Placement | None = None
    actor: TrainerGroup | None = None
    managers: ManagerGroup | None = None
    rollout: EngineRollout | None = None
    engines: tuple[ActorHandle[EngineActor], ...] = ()
    template: EngineTemplate | None = None
    chaos: Chaos | None = None
    residency: Residency | None = None  # None: trainer and engines stay on their devices

    def start(
        self,
        inputs: RunInputs,
        first: int,
        sink: SinkGroup,
        stop: StopRequest,
        control: Control,
        record: Mapping[str, Any],
    ) -> Run:
        """Start every process that the run needs and return the run. ``record`` is stored in each checkpoint.

        If trainer and engines share GPUs or ``placement.offload_rollout`` is set, the engines start first, because SGLang derives
        the size of its KV cache from the memory that is free before and after it loads the model. Otherwise they start together.
        """
        self._open_placement()
        if self.plan.needs_engines:
            self._start_engines()
        if self.cfg.placement.offload_rollout:
            addresses, rollout = self._start_released(inputs, first)
            trainer = self._start_trainer(first)
        else:
            trainer = self._start_trainer(first)
            addresses = self._wait_for_engines()
            rollout = self._start_rollout(inputs, addresses, first)
        if first > 0:
            rollout.load(self._checkpoints(), first)
        sync = self._make_sync()
        if isinstance(rollout, EngineRollout):
            rollout.push_weights = lambda: sync.push(trainer.version)
        trainer, rollout = self._with_moves(trainer, rollout)
        self.chaos = self._plan_faults()
        return Run(
            cfg=self.cfg,
            run_dir=self.run_dir,
            trainer=trainer,
            rollout=rollout,
            sync=sync,
            assembly=self._assembly(inputs.routing),
            sink=sink,
            spans=Spans(),
            stop=stop,
            control=control,
            first_rollout=first,
            engine_ranks=sum(address.tp for address in addresses),
            checkpoints=self._make_checkpoints(trainer, rollout, first, record),
            chaos=self.chaos,
            drift=self._drift_watch(),
        )

    def _open_placement(self) -> None:
        """Start Ray, or join a cluster and adapt the plan to its nodes; print the decisions and warnings."""
        self.placement = Placement(self.cfg, self.plan, str(self.run_dir / "stacks"), self.say)
        cluster_plan = self.placement.open()
        self.plan = cluster_plan.plan
        for decision in cluster_plan.decisions:
            self.say(f"{decision.key}={decision.value}: {decision.reason}")
        for line in cluster_plan.warnings:
            sys.stderr.write(visible(f"warning: {line}\n"))
        self.progress.ready("Ray is up", "trainer and engines" if self.plan.needs_engines else "trainer")

    def _start_engines(self) -> None:
        """Start the engines and the rollout managers. If the engines share GPUs with the trainer, wait until they respond."""
        assert self.placement is not None, "start comes first"
        self.template = self.placement.engine_template(secrets.token_urlsafe(32))
        self.engines = tuple(self.placement.start_engines(self.template))
        self.managers = self.placement.start_managers()
        if self.engines and self.plan.colocated and self.plan.device == "cuda":
            self._wait_for_engines()

    def _start_released(self, inputs: RunInputs, first: int) -> tuple[tuple[EngineAddress, ...], RolloutSource]:
        """Wait for the engines, connect the rollout managers, and release the engines' memory so that the trainer can start."""
        addresses = self._wait_for_engines()
        rollout = self._start_rollout(inputs, addresses, first)
        assert self.managers is not None, "placement.offload_rollout needs engines"
        self.residency = Residency(engines=EngineStates(self.managers, self.cfg.loop.step_deadline_s))
        self.residency.enter(STEP)
        return addresses, rollout

    def _with_moves(self, trainer: Trainer, rollout: RolloutSource) -> tuple[Trainer, RolloutSource]:
        """Return trainer and rollout source in wrappers that move the required state to the devices before each call.

        The ``push_weights`` of an ``EngineRollout`` is replaced as well. If the run moves no state, return the arguments.
        """
        if self.residency is None:
            return trainer, rollout
        if isinstance(rollout, EngineRollout):
            rollout.push_weights = pushes_within(rollout.push_weights, self.residency)
        return ResidentTrainer(trainer, self.residency), ResidentRollout(rollout, self.residency)

    def _plan_faults(self) -> Chaos:
        """Return the injector of the faults of ``chaos.*``."""
        engines = {f"engine {i}": engine for i, engine in enumerate(self.engines)}
        chaos = Chaos(self.cfg.chaos, self.run_dir, engines, self.managers)
        chaos.plan(self.cfg.loop.num_rollout)
        return chaos

    def _make_checkpoints(
        self, trainer: Trainer, rollout: RolloutSource, first: int, record: Mapping[str, Any]
    ) -> Checkpoints:
        return Checkpoints(
            folder=self.run_dir / "checkpoints",
            trainer=trainer,
            rollout=rollout,
            config=self.cfg.run,
            enabled=self.plan.needs_trainer,
            last=first,
            run=record,
        )

    def _drift_watch(self) -> DriftWatch:
        tolerances, replayed = self.plan.tolerances, self.cfg.run.mode == "train_only"
        return DriftWatch(tolerances.rounding, tolerances.probe, None if replayed else self.cfg.weights.drift_warning)

    def _start_trainer(self, first: int) -> Trainer:
        assert self.placement is not None, "start comes first"
        if not self.plan.needs_trainer:
            return FrozenTrainer(first)
        actor = TrainerGroup(self.placement.start_trainers(), self.plan.actor)
        critic, teacher = self._role("critic", self.plan.critic), self._role("teacher", self.plan.teacher)
        groups = [group for group in (actor, critic, teacher) if group is not None]
        seconds = max(self.cfg.rollout.start_deadline_s, self.cfg.loop.step_deadline_s)
        deadline = actor.deadline("connect", seconds)
        if self.cfg.placement.ray_address is not None:
            specs = [spec for spec in (self.plan.actor, self.plan.critic, self.plan.teacher) if spec is not None]
            check_node_paths(list(zip(groups, specs, strict=True)), deadline, self.progress.waiting)
            writers = [group for group in (actor, critic) if group is not None]
            if nodes := find_separate_nodes(self.run_dir, writers, deadline, self.progress.waiting):
                self.say(f"run.dir is not shared with {', '.join(nodes)}: checkpoints are sent between the nodes")
        connect(groups, deadline, self.progress.waiting)
        self.progress.ready("trainer is up", "engines" if self.engines else "")
        self.actor = actor
        if self.cfg.placement.offload_train:
            self.residency = self.residency or Residency()
            self.residency.actor, self.residency.other_roles = actor, tuple(groups[1:])
        trainer = self._combine_roles(actor, critic, teacher)
        if first > 0:
            trainer.load(self._checkpoints(), first)
        return trainer

    def _combine_roles(self, actor: TrainerGroup, critic: RoleGroup | None, teacher: RoleGroup | None) -> Trainer:
        """Return ``actor`` or, if there is a critic or teacher, a trainer that combines them."""
        if critic is None and teacher is None:
            return actor
        return MultiRoleTrainer(actor, critic, teacher, self.cfg.critic)

    def _role(self, name: str, spec: CriticSpec | TeacherSpec | None) -> RoleGroup | None:
        assert self.placement is not None, "start comes first"
        return None if spec is None else RoleGroup(name, self.placement.start_role(name), spec)

    def _wait_for_engines(self) -> tuple[EngineAddress, ...]:
        refs = {f"engine {i}": call(actor, EngineActor.ready) for i, actor in enumerate(self.engines)}
        deadline = Deadline("driver", "engine start", self.cfg.rollout.start_deadline_s + 30)
        return tuple(wait_all(refs, deadline, self.progress.waiting).values())

    def _start_rollout(self, inputs: RunInputs, addresses: tuple[EngineAddress, ...], first: int) -> RolloutSource:
        cfg = self.cfg
        if cfg.run.replay_from is not None:
            return ReplayRollout(Path(cfg.run.replay_from))
        if self.managers is None:
            assert inputs.source is not None, "a run without engines or dumps trains on demonstrations"
            return DemonstrationRollout(inputs.source, cfg.rollout.batch_size)
        spec = ManagerSpec(
            rollout=cfg.rollout,
            reward=cfg.reward,
            evaluation=cfg.evaluation,
            loop=cfg.loop,
            tokenizer_path=cfg.model.hf_checkpoint,
            max_context_len=self.plan.max_context_len,
            stop_token_ids=inputs.stop_token_ids,
            chat_template_kwargs=cfg.data.chat_template_kwargs,
            temperature=cfg.rollout.temperature,
            seed=cfg.run.seed,
            probe_sequences=cfg.weights.probe_sequences,
            first_rollout=first,
            deterministic=cfg.run.deterministic,
            health=cfg.health,
            routing=inputs.routing,
            releases_memory=cfg.placement.offload_rollout,
            has_fixed_gpus=self.plan.transport.kind == IPC and self.plan.needs_trainer,
            receives_pushes=self.plan.needs_trainer,
        )
        deadline = Deadline("driver", "rollout manager start", cfg.rollout.start_deadline_s)
        engines, template = list(zip(self.engines, addresses, strict=True)), self.template
        assert template is not None and inputs.source is not None, "engines were started with them"
        source, heldout = put(inputs.source), put(inputs.heldout)
        connected = self.managers.start_each(
            lambda actor, share: call(
                actor, RolloutActor.connect, replace(spec, share=share), source, heldout, engines, template
            )
        )
        wait_all(connected, deadline, self.progress.waiting)
        selection = open_selection(cfg, self.plan.samples_per_rollout)
        self.rollout = EngineRollout(self.managers, selection, cfg.loop.step_deadline_s)
        return self.rollout

    def _make_sync(self) -> Sync:
        if self.managers is None or self.actor is None:
            return NoSync()
        return EngineSync(
            trainer=self.actor,
            managers=self.managers,
            manifest=manifest.merge(self.actor.manifests()),
            transport=self.plan.transport,
            config=self.cfg.weights,
            tolerance=self.plan.tolerances.probe,
            max_score_tokens=self.cfg.parallel.max_tokens_per_rank * self.cfg.parallel.cp,
            max_losses=self.cfg.health.max_restarts + 1,
            residency=self.residency,
        )

    def _assembly(self, routing: RoutingShape | None) -> AssembleSpec:
        cfg, name = self.cfg, self.cfg.algo.group_advantage
        return AssembleSpec(
            group_advantage=None if name is None else bind_group_advantage(name),
            aggregation=cfg.algo.aggregation,
            steps_per_rollout=cfg.loop.steps_per_rollout,
            dp=self.plan.actor.layout.dp,
            max_tokens_per_rank=cfg.parallel.max_tokens_per_rank * cfg.parallel.cp,  # cp ranks share each row
            max_response_len=cfg.rollout.max_response_len,
            mask_truncated=isinstance(cfg.algo, PolicyConfig) and cfg.algo.mask_truncated,
            mask_offpolicy=isinstance(cfg.algo, PolicyConfig) and cfg.algo.mask_offpolicy,
            overlong=overlong_penalty(cfg),
            routing=routing,
        )

    def _checkpoints(self) -> Path:
        return checkpoint_folder(self.cfg, self.run_dir)

    def causes_of_death(self, *, suspected: bool) -> list[str]:
        """Return the cause of death of each dead engine.

        Only engines that the driver started are covered, without those that a request for fewer engines removed. Engines
        that do not respond within ``POST_MORTEM_S`` are left out. With ``health.on_dead_engine=restart``, engines whose
        actor is lost are left out too, because a manager replaces them. If a death is ``suspected``, an engine whose
        server still runs first waits a few seconds for the server to end.
        """
        current_engines = self.engines[: None if self.rollout is None else self.rollout.fewest_engines]
        refs = {
            f"engine {i}": call(actor, EngineActor.cause_of_death, suspected) for i, actor in enumerate(current_engines)
        }
        deadline = Deadline("driver", "post mortem", POST_MORTEM_S)
        causes: list[str] = []
        for name, ref in refs.items():
            try:
                cause = wait_one(name, ref, deadline)
            except DeadlineExceeded:  # still starting, not dead
                cause = ""
            except WorkerError as error:  # an engine that was lost with its node: the manager has started another one
                is_replaced = error.died and self.cfg.health.on_dead_engine == "restart"
                cause = "" if is_replaced else one_line(error)
            except SlimeLikeError as error:
                cause = one_line(error)
            if cause:
                causes.append(f"{name}: {cause}")
        return causes

    def report_faults(self) -> None:
        """Fetch the last recoveries from the managers, which must still run, and print the recovery report (``report_lines``)."""
        if self.chaos is None:
            return
        managers = self.managers or ManagerGroup(())
        for name, ref in managers.start_each(lambda actor, _: call(actor, RolloutActor.last_recoveries)).items():
            try:
                self.chaos.record_recoveries(wait_one(name, ref, Deadline("driver", "report", REPORT_S)))
            except SlimeLikeError as error:
                self.say(f"faults: the {name} did not report other losses ({one_line(error)})")
        for line in report_lines(self.chaos.injections, self.chaos.recoveries, self.chaos.pending):
            self.say(line)

    @property
    def log_dir(self) -> Path | None:
        """Return the log folder of the run's Ray actors; None if there is none."""
        return None if self.placement is None else self.placement.log_dir

    def close(self) -> None:
        """Stop all started processes."""
        if self.placement is not None:
            self.placement.close()
