"""Memory of a run's processes on its GPUs, by the planner; refuses a run that cannot fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import Role
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.engine import (
    EngineMemory,
    EngineSettings,
    engine_memory,
    state_bytes,
    token_bytes,
    useful_dcp,
)
from slime_like.planner.hardware import CORES_PER_GPU, Hardware, known_gpu
from slime_like.planner.host import host_engine, host_slots, host_tokens, host_trainer
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import MemoryTable, gib
from slime_like.planner.trainer import TrainerSettings, trainer_memory

KV_BYTES = {"auto": 2, "bfloat16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
"""SGLang's kv_cache_dtype -> bytes per element of a 16-bit model."""
SMALLEST_STATIC = 0.1


@dataclass(frozen=True, slots=True)
class RoleShapes:
    """Shapes of the models of a run; None if a folder has no config.json yet."""

    actor: ModelShape | None
    critic: ModelShape | None = None
    teacher: ModelShape | None = None
    unknown: str = "run.prepare has not written the model yet"  # the reason, if the actor's shape is not known


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted memory of each role on one GPU, and the roles of the GPU that needs most."""

    tables: tuple[tuple[str, MemoryTable], ...] = ()  # role and memory of one of its processes on one GPU
    gpu: str = ""
    available: float = 0.0  # bytes of one GPU
    busiest: tuple[str, ...] = ()  # roles on the GPU that needs most
    engine: EngineMemory | None = None
    wider_dcp: int = 1  # rollout.dcp that would hold the most tokens, if more than now
    wider_tokens: int = 0  # KV capacity of an engine with it
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
    if cfg.placement.ray_address is not None and machine.is_local:
        return MemoryPlan(unknown="the GPUs of a joined Ray cluster are known only once it responds")
    if shapes.actor is None:
        return MemoryPlan(unknown=shapes.unknown)
    name = machine.gpu_names[0] if machine.gpu_names else ""
    gpu = known_gpu(name)
    if gpu is None:
        return MemoryPlan(unknown=f"the planner does not know the GPU {name!r}")
    hardware = Hardware(gpu, machine.num_gpus // machine.nodes, machine.nodes, CORES_PER_GPU * machine.num_gpus)
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
    memory, wider = None, (1, 0)
    if any(role.name == "trainer" for role in roles):
        tables.append(("trainer", host_trainer(shape, trainer_settings(actor))))
    if engines:
        settings = engine_settings(engines[0])
        limit = engines[0].sglang.get("max_total_tokens")
        tokens = host_tokens(shape, settings, machine.memory_bytes, limit)
        per_token, per_state = token_bytes(shape, settings), state_bytes(shape, settings)
        table = host_engine(shape, settings, tokens)
        requests = host_slots(settings) // settings.states_per_request
        memory = EngineMemory(table, tokens * per_token, per_token, per_state, requests, groups=1)
        tables.append(("engine", table))
        if (dcp := _wider_dcp(shape, settings, actor)) > 1:
            wider = dcp, host_tokens(shape, replace(settings, dcp=dcp), machine.memory_bytes, limit)
    return MemoryPlan(
        tables=tuple(tables),
        available=machine.memory_bytes,
        engine=memory,
        wider_dcp=wider[0],
        wider_tokens=wider[1],
    )


def _wider_dcp(shape: ModelShape, settings: EngineSettings, actor: RankSpec) -> int:
    """Return the ``rollout.dcp`` that holds the most tokens; 1 if that is the configured one, or DCP is not possible."""
    useful = useful_dcp(shape, settings)
    possible = useful > settings.dcp and settings.attention_tp % useful == 0 and not actor.deterministic
    return useful if possible else 1


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
        dcp, tokens = self._wider()
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
            wider_dcp=dcp,
            wider_tokens=tokens,
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

    def _wider(self) -> tuple[int, int]:
        """Return the ``rollout.dcp`` with the most KV capacity and that capacity; (1, 0) if it is the configured one."""
        if not self.engines or self.shapes.actor is None:
            return 1, 0
        settings = engine_settings(self.engines[0], self.static)
        dcp = _wider_dcp(self.shapes.actor, settings, self.actor)
        wider = replace(settings, dcp=dcp)
        return dcp, engine_memory(self.shapes.actor, wider, self.hardware).tokens if dcp > 1 else 0

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


def engine_settings(spec: EngineSpec, static: float | None = None) -> EngineSettings:
    """Return the planner's settings of an engine; fields of ``rollout.sglang`` that it does not know are ignored."""
    options = spec.sglang
    eager = options.get("disable_cuda_graph") or options.get("disable_decode_cuda_graph")
    wide = 4 if spec.dtype == "float32" else KV_BYTES.get(str(options.get("kv_cache_dtype", "auto")), 2)
    return EngineSettings(
        gpus=spec.tp,
        dcp=spec.dcp,
        dp_attention=int(options.get("attn_dp_size") or 1),
        weights="fp8" if options.get("quantization") == "fp8" else spec.dtype,
        kv_bytes=wide,
        static=static or options.get("mem_fraction_static"),
        chunk=int(options.get("chunked_prefill_size") or 8_192),
        graph_requests=0 if eager else options.get("cuda_graph_max_bs_decode"),
        replicated_head=bool(options.get("enable_dp_lm_head")),
        max_running=spec.max_running_requests,
        states_per_request=_states_per_request(spec),
        max_tokens=options.get("max_total_tokens"),
    )


def _states_per_request(spec: EngineSpec) -> int:
    """Return the recurrent states that SGLang counts per request: three, and those that its radix cache tracks."""
    options = spec.sglang
    on_host = spec.device == "cpu"
    if options.get("disable_radix_cache") or (on_host and spec.dcp > 1):  # the CPU platform disables it under DCP
        return 1
    strategy, overlap = options.get("mamba_radix_cache_strategy", "auto"), not options.get("disable_overlap_schedule")
    if strategy == "auto":
        paged = (options.get("page_size") or 1) > 1
        strategy = "extra_buffer" if not on_host and (overlap or paged) else "no_buffer"
    tracked = {"no_buffer": 0, "extra_buffer_lazy": 1}.get(strategy, 2 if overlap else 1)
    return 3 + tracked


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


def memory_lines(plan: MemoryPlan, sequence: int, in_flight: int, max_running: int | None = None) -> Iterator[str]:
    """Describe the memory of each role on a GPU, and the sequences that fit the cache.

    ``sequence`` is the longest sequence in tokens, ``in_flight`` the number that one engine samples in a rollout, and
    ``max_running`` the configured limit on the requests of one engine.
    """
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
        fit = plan.engine.requests(sequence)
        limit = _limit(plan.engine, fit, in_flight, max_running)
        yield (
            f"  KV cache {plan.engine.tokens:,} tokens per engine: {fit:,} sequences of {sequence:,} tokens; a rollout samples "
            f"{in_flight:,} per engine, limited by {limit}"
        )
        if limit == "the KV cache" and plan.wider_tokens > plan.engine.tokens:
            yield f"  rollout.dcp={plan.wider_dcp} would hold {plan.wider_tokens:,} tokens per engine (docs/dcp.md)"


def _limit(engine: EngineMemory, fit: int, in_flight: int, max_running: int | None) -> str:
    """Return the limit on the sequences that an engine samples at once."""
    if max_running is not None and max_running <= min(fit, in_flight):
        return "rollout.max_running_requests"
    if fit >= in_flight:
        return "the rollout's size"
    return "recurrent states" if engine.slot_bytes and fit == engine.groups * engine.state_requests else "the KV cache"
