"""Memory of a run's processes on its GPUs, by the planner; refuses a run that cannot fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.cluster.plan.admission import EngineLoad
from slime_like.cluster.plan.engine import engine_settings, host_engine_memory, known_hardware
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import Role, RoleShapes
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.engine import EngineMemory, engine_memory
from slime_like.planner.hardware import Hardware
from slime_like.planner.host import host_trainer
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import MemoryTable, gib
from slime_like.planner.trainer import TrainerSettings, trainer_memory

SMALLEST_STATIC = 0.1


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted memory of each role on one GPU, and the roles of the GPU that needs most."""

    tables: tuple[tuple[str, MemoryTable], ...] = ()  # role and memory of one of its processes on one GPU
    gpu: str = ""
    available: float = 0.0  # bytes of one GPU
    busiest: tuple[str, ...] = ()  # roles on the GPU that needs most
    engine: EngineMemory | None = None
    unknown: str = ""  # the reason, if nothing is predicted
    warning: str = ""  # if the run fits only without the allocator's overhead

    @property
    def needed(self) -> float:
        """Predicted bytes on the GPU that needs most."""
        return sum(table.total for role, table in self.tables if role in self.busiest)

    @property
    def least(self) -> float:
        """Minimum bytes for the run to start: ``needed`` without the allocator's overhead."""
        return self.needed - sum(table.of("allocator") for role, table in self.tables if role in self.busiest)


def plan_memory(
    cfg: TrainConfig,
    machine: Machine,
    shapes: RoleShapes,
    actor: RankSpec,
    engines: tuple[EngineSpec, ...],
    roles: tuple[Role, ...],
    others: tuple[CriticSpec | None, TeacherSpec | None],
) -> MemoryPlan:
    """Predict the memory of a run on GPUs. Raises ``ConfigError`` naming the keys to change if a GPU is too small."""
    if actor.device != "cuda" and shapes.actor is not None:
        return _host_plan(machine, shapes.actor, actor, engines, roles)
    hardware = known_hardware(cfg, machine, shapes)
    if isinstance(hardware, str):
        return MemoryPlan(unknown=hardware)
    demand = _Demand(cfg, shapes, actor, engines, roles, others, hardware)
    plan = demand.plan()
    if plan.least > plan.available:
        raise ConfigError(_refusal(demand, plan))
    if not _serves(demand, plan):
        raise ConfigError(_engine_refusal(demand, plan))
    if plan.needed > plan.available:
        return replace(plan, warning=_refusal(demand, plan))
    return plan


def _host_plan(
    machine: Machine, shape: ModelShape, actor: RankSpec, engines: tuple[EngineSpec, ...], roles: tuple[Role, ...]
) -> MemoryPlan:
    """Predict the resident memory of trainer ranks and engines on a CPU."""
    tables: list[tuple[str, MemoryTable]] = []
    if any(role.name == "trainer" for role in roles):
        tables.append(("trainer", host_trainer(shape, trainer_settings(actor))))
    memory = host_engine_memory(machine, shape, engines[0]) if engines else None
    if memory is not None:
        tables.append(("engine", memory.table))
    return MemoryPlan(tables=tuple(tables), available=machine.memory_bytes, engine=memory)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Inputs of a prediction; a proposed change replaces some of them."""

    cfg: TrainConfig
    shapes: RoleShapes
    actor: RankSpec
    engines: tuple[EngineSpec, ...]
    roles: tuple[Role, ...]
    others: tuple[CriticSpec | None, TeacherSpec | None]
    hardware: Hardware
    trainer: TrainerSettings | None = None
    static: float | None = None

    def plan(self) -> MemoryPlan:
        """Return the predicted memory and the roles of the GPU that needs most."""
        tables, engine = dict(self._tables()), self._engine()
        if engine is not None:
            tables["engine"] = engine.table
        gpus: dict[int, list[str]] = {}
        for role in self.roles:
            for index in {index for devices in role.devices for index in devices}:
                gpus.setdefault(index, []).append(role.name)
        busiest = max(gpus.values(), key=lambda names: sum(tables[n].total for n in names if n in tables), default=[])
        return MemoryPlan(
            tables=tuple((role.name, tables[role.name]) for role in self.roles if role.name in tables),
            gpu=self.hardware.gpu.name,
            available=self.hardware.gpu.memory,
            busiest=tuple(busiest),
            engine=engine,
        )

    @property
    def settings(self) -> TrainerSettings:
        """Settings of the actor's ranks."""
        return self.trainer or trainer_settings(self.actor)

    def _tables(self) -> Iterator[tuple[str, MemoryTable]]:
        assert self.shapes.actor is not None, "plan_memory returned early"
        yield "trainer", trainer_memory(self.shapes.actor, self.settings)
        critic, teacher = self.others
        if critic is not None and self.shapes.critic is not None:
            yield "critic", _without(trainer_memory(self.shapes.critic, trainer_settings(critic.rank)), "output layer")
        if teacher is not None and self.shapes.teacher is not None:
            scoring = replace(trainer_settings(teacher.rank), recompute="full")
            whole = trainer_memory(self.shapes.teacher, scoring)
            yield "teacher", _without(whole, "gradients", "optimizer", "activations")

    def _engine(self) -> EngineMemory | None:
        if not self.engines or self.shapes.actor is None:
            return None
        return engine_memory(self.shapes.actor, engine_settings(self.engines[0], self.static), self.hardware)


def trainer_settings(spec: RankSpec) -> TrainerSettings:
    """Return the planner's settings of a Megatron rank."""
    layout, model = spec.layout, spec.model
    return TrainerSettings(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        dp=layout.dp,
        ep=layout.ep,
        tokens=spec.max_tokens_per_rank,
        dtype=spec.dtype,
        recompute=model.recompute,
        recompute_layers=model.recompute_num_layers or 1,
        logits_chunk=model.logits_chunk,
        offload=spec.optim.cpu_offload_fraction if spec.optim.cpu_offload else 0.0,
        distributed_optimizer=layout.distributed_optimizer,
        sequence_parallel=layout.sequence_parallel,
    )


def _without(table: MemoryTable, *names: str) -> MemoryTable:
    return MemoryTable(tuple(item for item in table.items if item.name not in names))


def _refusal(demand: _Demand, plan: MemoryPlan) -> str:
    """Return the message of a run that does not fit: its numbers, and each single change that makes it fit."""
    parts = ", ".join(f"{role} {gib(table.total)}" for role, table in plan.tables if role in plan.busiest)
    worst = max((pair for pair in plan.tables if pair[0] in plan.busiest), key=lambda pair: pair[1].total)
    largest = sorted(worst[1].items, key=lambda item: -item.num_bytes)[:2]
    detail = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in largest)
    fixes = [key for key, changed in _remedies(demand, plan) if _fits(changed)]
    advice = f"set {' or '.join(fixes[:3])}" if fixes else "use more or larger GPUs, or raise parallel.tp, pp or ep"
    return (
        f"the run needs {gib(plan.needed)} on a GPU ({parts}; the {worst[0]}'s {detail}), but each {plan.gpu} has "
        f"{gib(plan.available)}: {advice} (docs/planner.md)"
    )


def _fits(demand: _Demand) -> bool:
    plan = demand.plan()
    return plan.needed <= plan.available and _serves(demand, plan)


def _serves(demand: _Demand, plan: MemoryPlan) -> bool:
    """Return whether the engine starts and its KV cache holds one sequence of the context length."""
    if plan.engine is None:
        return True
    return plan.engine.pool > 0 and plan.engine.requests(demand.engines[0].context_length) >= 1


def _starts(demand: _Demand) -> bool:
    plan = demand.plan()
    return plan.least <= plan.available and _serves(demand, plan)


def _engine_refusal(demand: _Demand, plan: MemoryPlan) -> str:
    """Return the message of an engine that cannot hold one sequence, with the changes that make it hold one."""
    assert plan.engine is not None, "_serves accepts a plan without engines"
    spec = demand.engines[0]
    weights, pool = plan.engine.table.of(*_WEIGHTS), plan.engine.pool
    fixes = [key for key, _ in _engine_remedies(demand)]
    advice = f"set {' or '.join(fixes)}" if fixes else "raise rollout.tp, or use more or larger GPUs"
    if pool <= 0:
        problem = f"its share of a GPU of {gib(plan.available)} is {gib(weights + pool)}, less than its weights"
    else:
        problem = f"its KV cache of {plan.engine.tokens:,} tokens holds no sequence of {spec.context_length:,} tokens"
    return (
        f"an engine with rollout.tp={spec.tp} has {gib(weights)} of weights on each {plan.gpu}, and {problem}: "
        f"{advice} (docs/planner.md)"
    )


def _engine_remedies(demand: _Demand) -> Iterator[tuple[str, _Demand]]:
    """Yield the changes that leave an engine more memory: the smallest sufficient static fraction and tensor parallel size."""
    statics = (percent / 100 for percent in range(10, 95, 5))
    changes = ((f"rollout.sglang.mem_fraction_static={share:g}", replace(demand, static=share)) for share in statics)
    yield from next(([change] for change in changes if _starts(change[1])), [])
    assert demand.shapes.actor is not None, "plan_memory returned early"
    spec, heads = demand.engines[0], demand.shapes.actor.heads
    tp = 2 * spec.tp
    while tp <= demand.hardware.gpus and heads % tp == 0:
        wider = replace(demand, engines=(replace(spec, tp=tp), *demand.engines[1:]))
        if _starts(wider):
            yield f"rollout.tp={tp}", wider
            return
        tp *= 2


def _remedies(demand: _Demand, plan: MemoryPlan) -> Iterator[tuple[str, _Demand]]:
    """Yield changes of one setting, named by key, least costly first."""
    settings = demand.settings
    shared = "engine" in plan.busiest and "trainer" in plan.busiest
    if "engine" in plan.busiest and plan.engine is not None:
        outside = plan.needed - plan.available
        current = plan.engine.pool + plan.engine.table.of(*_WEIGHTS)
        static = int(20 * (current - outside) / plan.available) / 20
        if static >= SMALLEST_STATIC:
            yield f"rollout.sglang.mem_fraction_static={static:g}", replace(demand, static=static)
    if "trainer" in plan.busiest:
        if settings.recompute != "full":
            yield "model.recompute=full", replace(demand, trainer=replace(settings, recompute="full"))
        if settings.offload < 1 and settings.dtype == "bfloat16":
            yield "optim.cpu_offload=true", replace(demand, trainer=replace(settings, offload=1.0))
        longest = demand.engines[0].context_length if demand.engines else 0
        for tokens in (settings.tokens // 2, settings.tokens // 4):
            if tokens >= min(longest, settings.tokens):
                change = replace(settings, tokens=tokens)
                yield f"parallel.max_tokens_per_rank={tokens}", replace(demand, trainer=change)
    if shared and _num_devices(demand, "trainer") + _num_devices(demand, "engine") <= demand.hardware.num_gpus:
        apart = tuple(role for role in demand.roles if role.name != "engine")
        yield "placement.mode=split", replace(demand, roles=apart)


def _num_devices(demand: _Demand, name: str) -> int:
    return sum(len(devices) for role in demand.roles if role.name == name for devices in role.devices)


_WEIGHTS = ("attention", "FlowMLA slots", "experts", "MLP", "router and norms", "embedding", "output layer")


def memory_lines(plan: MemoryPlan, load: EngineLoad) -> Iterator[str]:
    """Describe the memory of each role on a GPU, and the sequences that fit the cache."""
    if plan.unknown:
        yield f"memory     not predicted: {plan.unknown}"
        return
    if plan.gpu:
        together = " + ".join(plan.busiest)
        yield f"memory     {gib(plan.needed)} of {gib(plan.available)} on each GPU with {together} ({plan.gpu})"
    else:
        yield f"memory     resident, of each trainer rank and engine, on a machine with {gib(plan.available)}"
    for role, table in plan.tables:
        parts = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in table.items)
        yield f"  {role:<9}{gib(table.total)}: {parts}"
    if plan.engine is not None:
        yield (
            f"  KV cache {plan.engine.tokens:,} tokens per engine: {plan.engine.requests(load.sequence):,} sequences of "
            f"{load.sequence:,} tokens; a rollout samples {load.num_samples:,} per engine, limited by {load.limit_on(plan.engine)}"
        )
