"""Predicted memory of a run's processes, on GPUs or on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from slime_like.cluster.plan.engine import engine_settings, host_engine_memory
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.phases import Offloads, PhaseMemory, phase_memory
from slime_like.cluster.plan.types import Role, RoleShapes
from slime_like.config.rules.tree import samples_per_step
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.hardware import Hardware
from slime_like.planner.engine import EngineMemory, engine_memory
from slime_like.planner.host import host_trainer
from slime_like.planner.table import MemoryTable, items
from slime_like.planner.trainer import POLICY, SCORING, VALUE, TrainerSettings, trainer_memory


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted memory of one rank of each role and, on GPUs, of the busiest GPU.

    The busiest GPU is the one that needs the most memory. If some GPUs are too small even without the allocator's overhead,
    it is one of these.
    """

    tables: tuple[tuple[str, MemoryTable], ...] = ()  # role, and memory of one rank or, on a CPU, engine
    gpu: str = ""
    available: float = 0.0  # bytes of one GPU or, in a run on a CPU, of main memory
    busiest: tuple[str, ...] = ()  # roles on the busiest GPU
    engine: EngineMemory | None = None
    unknown: str = ""  # the reason, if nothing is predicted
    warning: str = ""  # for example, that the run fits only without the allocator's overhead
    source: str = ""  # source of ``available``, if it is not the driver
    host: MemoryTable | None = None  # main memory of one node of a run on GPUs
    demand: Demand | None = None  # inputs, from which changes are predicted
    phases: tuple[PhaseMemory, ...] = ()  # phases of the busiest GPU
    trainer_phases: tuple[PhaseMemory, ...] = ()  # phases of the busiest GPU that has a trainer rank

    @property
    def peak(self) -> PhaseMemory:
        """Phase in which the busiest GPU needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total, default=PhaseMemory("", ()))

    @property
    def needed_bytes(self) -> float:
        """Predicted bytes on the busiest GPU; 0 in a run on a CPU or if nothing is predicted."""
        return self.peak.total

    @property
    def by_role(self) -> MemoryTable:
        """Memory by role: on the busiest GPU in its ``peak`` phase or, in a run on a CPU, of all processes of the role."""
        if self.gpu:
            shares = [(role, table.total, "") for role, table in self.peak.tables]
        else:
            counts = {role.name: len(role.devices) for role in (self.demand.roles if self.demand is not None else ())}
            shares = [(role, counts.get(role, 0) * table.total, "") for role, table in self.tables]
        return MemoryTable(items(*shares))

    @property
    def min_bytes(self) -> float:
        """Predicted bytes on the busiest GPU, without the allocator's overhead; 0 on a CPU or if nothing is predicted.

        The run does not fit on GPUs with less memory.
        """
        return max((phase.min_total for phase in self.phases), default=0.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """Inputs of a memory prediction; a proposed change to the config replaces some of them."""

    cfg: TrainConfig
    shapes: RoleShapes
    actor: RankSpec
    engines: tuple[EngineSpec, ...]
    roles: tuple[Role, ...]
    role_specs: tuple[CriticSpec | None, TeacherSpec | None]
    machine: Machine
    hardware: Hardware | None = None  # None: on a CPU
    trainer: TrainerSettings | None = None  # changed settings of the actor's ranks
    static: float | None = None  # changed mem_fraction_static of the engines
    offloads: Offloads | None = None  # changed release of memory

    def plan(self) -> MemoryPlan:
        """Return the predicted memory; on GPUs, with the roles and phases of the busiest one."""
        tables, engine = dict(self._tables()), self._engine()
        if engine is not None:
            tables["engine"] = engine.table
        role_tables = tuple((role.name, tables[role.name]) for role in self.roles if role.name in tables)
        if self.hardware is None:
            return MemoryPlan(tables=role_tables, available=self.machine.memory_bytes, engine=engine)
        gpus: dict[int, list[str]] = {}
        for role in self.roles:
            for index in {index for devices in role.devices for index in devices}:
                gpus.setdefault(index, []).append(role.name)
        scoring, available = self._scoring(), self.hardware.gpu.memory
        by_gpu = {
            tuple(names): phase_memory({n: tables[n] for n in names if n in tables}, scoring, self.offload_settings)
            for names in gpus.values()
        }

        def needs(pair: tuple[tuple[str, ...], tuple[PhaseMemory, ...]]) -> tuple[bool, float]:
            return any(p.min_total > available for p in pair[1]), max(p.total for p in pair[1])

        busiest, phases = max(by_gpu.items(), key=needs, default=((), ()))
        of_trainer = (pair for pair in by_gpu.items() if "trainer" in pair[0])
        return MemoryPlan(
            tables=role_tables,
            gpu=self.hardware.gpu.name,
            available=available,
            busiest=busiest,
            engine=engine,
            phases=phases,
            trainer_phases=max(of_trainer, key=needs, default=((), ()))[1],
        )

    @property
    def offload_settings(self) -> Offloads:
        """Settings by which trainer and engines release memory for each other, with a proposed change applied."""
        placement = self.cfg.placement
        if self.offloads is not None:
            return self.offloads
        return Offloads(placement.offload_train, placement.offload_rollout, self.actor.guard.release)

    @property
    def settings(self) -> TrainerSettings:
        """Planner settings of the actor's ranks, with a proposed change applied."""
        return self.trainer or trainer_settings(self.cfg, self.actor)

    def role_settings(self, rank: RankSpec, task: str) -> TrainerSettings:
        """Return the planner settings of a critic's or teacher's ranks.

        A proposed change of an actor's setting applies here too, unless the role's value already differed from the actor's.
        """
        settings, actor = trainer_settings(self.cfg, rank, task), trainer_settings(self.cfg, self.actor)
        changes = {
            field.name: getattr(self.settings, field.name)
            for field in fields(TrainerSettings)
            if getattr(self.settings, field.name) != getattr(actor, field.name) == getattr(settings, field.name)
        }
        return replace(settings, **changes)

    def _tables(self) -> Iterator[tuple[str, MemoryTable]]:
        """Yield the name and the memory of one rank of trainer, critic and teacher.

        The trainer is included even if the run starts none. Roles whose model is unknown are left out.
        """
        rank_memory = host_trainer if self.hardware is None else trainer_memory
        critic, teacher = self.role_specs
        if self.shapes.actor is not None:
            yield "trainer", rank_memory(self.shapes.actor, self.settings)
        if critic is not None and self.shapes.critic is not None:
            yield "critic", rank_memory(self.shapes.critic, self.role_settings(critic.rank, VALUE))
        if teacher is not None and self.shapes.teacher is not None:
            yield "teacher", rank_memory(self.shapes.teacher, self.role_settings(teacher.rank, SCORING))

    def _scoring(self) -> MemoryTable | None:
        """Return the memory of a trainer rank that has only its weights and computes log-probabilities.

        The result is None if the trainer is not offloaded (``placement.offload_train``) or the model is unknown.
        """
        if self.shapes.actor is None or not self.offload_settings.train:
            return None
        return trainer_memory(self.shapes.actor, replace(self.settings, task=SCORING))

    def _engine(self) -> EngineMemory | None:
        if not self.engines or self.shapes.actor is None:
            return None
        spec = replace(self.engines[0], releases_memory=self.offload_settings.rollout)
        if self.hardware is None:
            return host_engine_memory(self.machine, self.shapes.actor, spec, self.static)
        return engine_memory(self.shapes.actor, engine_settings(spec, self.static), self.hardware)


def trainer_settings(cfg: TrainConfig, spec: RankSpec, task: str = POLICY) -> TrainerSettings:
    """Return the planner's settings of a Megatron rank, assuming the most micro-batches that are possible: one per sample."""
    layout, model = spec.layout, spec.model
    return TrainerSettings(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        dp=layout.dp,
        ep=layout.ep,
        etp=layout.etp,
        tokens=spec.max_tokens_per_rank,
        dtype=spec.dtype,
        recompute=model.recompute,
        recompute_method=model.recompute_method,
        recompute_layers=model.recompute_num_layers or 1,
        logits_chunk=model.logits_chunk,
        offload=spec.optim.cpu_offload_fraction if spec.optim.cpu_offload and spec.device == "cuda" else 0.0,
        distributed_optimizer=layout.distributed_optimizer,
        sequence_parallel=layout.sequence_parallel,
        grouped_experts=model.megatron.get("moe_grouped_gemm", True),
        task=task,
        segments=layout.segments,
        num_micro_batches=max(1, -(-samples_per_step(cfg) // layout.dp)),
    )
