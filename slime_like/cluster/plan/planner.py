"""Plan a run for a machine: place its processes, and resolve ``auto`` values that a single process could not resolve.

Planning has no side effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slime_like.cluster.plan.actor import actor_spec
from slime_like.cluster.plan.admission import EngineLoad, add_admission_decision, engine_load, fixed_limit
from slime_like.cluster.plan.advice import advice
from slime_like.cluster.plan.dcp import DcpPlan, is_undecided, plan_dcp
from slime_like.cluster.plan.demand import MemoryPlan
from slime_like.cluster.plan.device import resolve_device
from slime_like.cluster.plan.engine_nodes import engine_nodes, on_nodes
from slime_like.cluster.plan.fit import PROCESS_BYTES, add_roles, check_fits, rank_roles
from slime_like.cluster.plan.gdn import resolve_gdn
from slime_like.cluster.plan.machine import Machine, probe_machine
from slime_like.cluster.plan.memory import plan_memory
from slime_like.cluster.plan.roles import critic_spec, role_bytes, teacher_spec
from slime_like.cluster.plan.shapes import model_config, role_shapes
from slime_like.cluster.plan.tolerances import LogprobTolerances, logprob_tolerances
from slime_like.cluster.plan.transport import plan_transport
from slime_like.cluster.plan.types import Decision, PlanDecisions, Role, num_gpus
from slime_like.config.rules.hf import HfConfig
from slime_like.config.rules.tree import samples_per_rollout, samples_per_step
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.flow_mla import FlowMlaConfig, FlowOptions
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.remote_experts import RemoteExpertsConfig, RemoteOptions
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec, TransportSpec
from slime_like.config.schema.rollout import AUTO, FLOAT8
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.counted import counted

__all__ = ["Decision", "Machine", "Plan", "Role", "make_plan", "probe_machine"]

MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement and resolved settings of a run."""

    device: str  # cpu | cuda
    actor: RankSpec
    critic: CriticSpec | None
    teacher: TeacherSpec | None  # None if there is no teacher, or if the actor's ranks score with it
    engines: tuple[EngineSpec, ...]  # empty if nothing is generated
    transport: TransportSpec
    needs_trainer: bool
    colocated: bool  # trainer and engines on the same devices; True even if only one of them runs
    trainer_threads: int  # per training rank of any role
    engine_threads: int  # per engine rank
    max_context_len: int
    samples_per_rollout: int
    samples_per_step: int
    load: EngineLoad
    dcp: DcpPlan
    tolerances: LogprobTolerances
    run_dir: str
    roles: tuple[Role, ...]
    memory: MemoryPlan
    decisions: tuple[Decision, ...]
    advice: tuple[str, ...] = ()  # valid but probably unintended settings

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the run uses. A GPU that several roles share counts once."""
        return num_gpus(self.roles)

    @property
    def summary(self) -> str:
        """Processes that the run starts, in one line."""
        counts = {role.name: len(role.devices) for role in self.roles}
        parts = [counted(n, name if name == "engine" else f"{name} rank") for name, n in counts.items()]
        return f"starting {' and '.join(parts)} on {self.device}"

    @property
    def needs_engines(self) -> bool:
        """True if the run generates samples."""
        return bool(self.engines)


def make_plan(cfg: TrainConfig, machine: Machine) -> Plan:
    """Resolve ``cfg`` for ``machine``, from config.json and the headers of the weight files of the run's models.

    The files of ``model.hf_checkpoint`` may be missing if ``run.prepare`` creates them, or if ``machine`` is not this one and
    the planner's table contains the model. Raises ``ConfigError`` or, if a model cannot be read, ``CheckpointError``.
    """
    decisions = PlanDecisions([])
    model = model_config(cfg, machine)
    device = resolve_device(cfg, model, machine, decisions)
    dtype = _dtype(cfg, device, decisions)
    context = _context(cfg, model, decisions)
    tolerances = logprob_tolerances(cfg, device, dtype, decisions)
    supervised = isinstance(cfg.algo, SftConfig)
    actor = replace(
        resolve_gdn(cfg, actor_spec(cfg, model, device, dtype, decisions), model, machine, decisions),
        sample_tolerance=tolerances.samples,
        drift_by_layer=cfg.weights.probe_layers and not supervised,
    )
    needs_trainer = cfg.run.mode != "rollout_only"
    critic, teacher = _other_roles(cfg, actor, decisions) if needs_trainer else (None, None)
    needs_engines = cfg.run.mode != "train_only" and not supervised
    num_nodes = engine_nodes(cfg, machine, device, decisions) if needs_engines else 1
    engines = on_nodes(_engines(cfg, model, device, dtype, context), num_nodes) if needs_engines else ()
    colocated = cfg.placement.mode == "colocated" or not (needs_trainer and needs_engines)
    roles = rank_roles(cfg, actor, engines, needs_trainer=needs_trainer, colocated=colocated, device=device)
    roles = add_roles(cfg, roles, critic, teacher, device)
    extra_bytes = role_bytes(critic, teacher, PROCESS_BYTES)
    check_fits(cfg, machine, model, roles, engines, device=device, role_bytes=extra_bytes)
    shapes, load, dcp = role_shapes(cfg, critic, teacher), engine_load(cfg, context), DcpPlan()
    if engines:
        dcp = plan_dcp(cfg, machine, model, shapes, engines[0], load, decisions)
        engines = tuple(dcp.applied_to(engine, cfg) for engine in engines)
    memory = plan_memory(cfg, machine, shapes, actor, engines, roles, (critic, teacher))
    if engines:
        largest_dcp = dcp.largest if is_undecided(cfg, machine) else dcp.size
        add_admission_decision(cfg.rollout, largest_dcp, memory.engine, decisions)
    trainer_threads, engine_threads = _threads(cfg, machine, roles, device, decisions)
    return Plan(
        device=device,
        actor=actor,
        critic=critic,
        teacher=teacher,
        engines=engines,
        transport=plan_transport(cfg, machine, device, num_nodes, decisions),
        needs_trainer=needs_trainer,
        colocated=colocated,
        trainer_threads=trainer_threads,
        engine_threads=engine_threads,
        max_context_len=context,
        samples_per_rollout=samples_per_rollout(cfg),
        samples_per_step=samples_per_step(cfg),
        load=load,
        dcp=dcp,
        tolerances=tolerances,
        run_dir=str(Path(cfg.run.dir).resolve()),
        roles=roles,
        memory=memory,
        decisions=tuple(decisions.entries),
        advice=(*((memory.warning,) if memory.warning else ()), *advice(cfg, machine, roles, device)),
    )


def _dtype(cfg: TrainConfig, device: str, decisions: PlanDecisions) -> str:
    if cfg.model.dtype != "auto":
        return cfg.model.dtype
    dtype = "bfloat16" if device == "cuda" else "float32"
    decisions.add("model.dtype", dtype, f"placement.device is {device}")
    return dtype


def _context(cfg: TrainConfig, model: HfConfig | None, decisions: PlanDecisions) -> int:
    if cfg.rollout.max_context_len is not None:
        return cfg.rollout.max_context_len
    if model is None:
        raise ConfigError(
            f"rollout.max_context_len is null and model.hf_checkpoint={cfg.model.hf_checkpoint!r} does not exist yet: "
            "set rollout.max_context_len"
        )
    decisions.add("rollout.max_context_len", model.max_positions, f"max_position_embeddings of {model.folder}")
    return model.max_positions


def _engines(cfg: TrainConfig, model: HfConfig | None, device: str, dtype: str, context: int) -> tuple[EngineSpec, ...]:
    """Return the specs of the engines, before decode context parallelism is planned from their memory."""
    rollout, logs = cfg.rollout, Path(cfg.run.dir).resolve() / "logs"
    max_running = fixed_limit(rollout)
    return tuple(
        EngineSpec(
            model_path=cfg.model.hf_checkpoint,
            device=device,
            dtype=dtype,
            tp=rollout.tp,
            dp_attention=rollout.dp_attention,
            flow_mla=_flow_mla(rollout.flow_mla),
            remote_experts=_remote_experts(rollout.remote_experts),
            context_length=context,
            seed=cfg.run.seed + index,
            log_path=str(logs / f"engine_{index}.log"),
            start_deadline_s=rollout.start_deadline_s,
            max_running_requests=max_running,
            admits_by_kv=rollout.max_running_requests == AUTO,
            deterministic=cfg.run.deterministic,
            cpu_kernels=rollout.cpu_kernels,
            releases_memory=cfg.placement.offload_rollout,
            float8=rollout.weight_dtype == FLOAT8,
            symmetric_memory=rollout.symmetric_memory,
            latent=model is not None and model.latent,
            returns_experts=isinstance(cfg.algo, PolicyConfig) and cfg.algo.routing_replay == "rollout",
            feeds_training=cfg.run.mode != "rollout_only",
            health_timeout_s=cfg.health.timeout_s,
            sglang=dict(rollout.sglang),
        )
        for index in range(rollout.num_engines)
    )


def _flow_mla(settings: FlowMlaConfig) -> str:
    """Return the FlowMLA settings of an engine as JSON; empty if FlowMLA is off."""
    if not settings.enabled:
        return ""
    distance, transport, max_ctas = settings.prefetch_distance, settings.transport, settings.max_ctas
    return FlowOptions(tuple(settings.weights), distance, transport, max_ctas).to_json()


def _remote_experts(remote: RemoteExpertsConfig) -> str:
    """Return the remote expert settings of an engine as JSON; empty if the engine has all experts itself."""
    options = RemoteOptions(
        experts=tuple(remote.experts),
        workers=tuple(remote.workers),
        count=remote.count,
        load_file=remote.load_file or "",
        record_load=remote.record_load or "",
        mode=remote.mode,
        transport=remote.transport,
        capacity=remote.capacity,
        payload_dtype=remote.payload_dtype,
        policy=remote.policy,
        deadline_s=remote.deadline_s,
        key_file=remote.key_file or "",
        threads=remote.threads,
        device=remote.device,
        shared_bytes=remote.shared_bytes,
    )
    return options.to_json() if remote.enabled else ""


def _other_roles(
    cfg: TrainConfig, actor: RankSpec, decisions: PlanDecisions
) -> tuple[CriticSpec | None, TeacherSpec | None]:
    """Return the specs of the critic and the teacher; None for one that the run does not have."""
    return critic_spec(cfg, actor, decisions.add), teacher_spec(cfg, actor)


def _threads(
    cfg: TrainConfig, machine: Machine, roles: tuple[Role, ...], device: str, decisions: PlanDecisions
) -> tuple[int, int]:
    """Return the number of threads per training rank and per engine rank."""
    if cfg.run.deterministic and device == "cpu":
        decisions.add(
            "threads per process", 1, "run.deterministic: with more threads, the order of sums depends on the shape"
        )
        return 1, 1
    nodes = max(machine.nodes, cfg.placement.actor_num_nodes)
    engines = -(-sum(len(role.devices) * cfg.rollout.tp for role in roles if role.name == "engine") // nodes)
    ranks = -(-sum(len(role.devices) for role in roles if role.name != "engine") // nodes)
    if cfg.loop.max_staleness == 0:
        schedule, concurrent_roles = "engines and ranks run in turns", (ranks, engines)
    else:
        schedule, concurrent_roles = "all run at the same time", (ranks + engines, ranks + engines)
    threads = tuple(max(1, min(MAX_THREADS, machine.cpu_count // max(1, processes))) for processes in concurrent_roles)
    node = "" if nodes == 1 else f" on each of {nodes} nodes"
    reason = f"{counted(machine.cpu_count, 'core')}, {counted(ranks, 'training rank')}, {counted(engines, 'engine rank')}{node}: {schedule}"
    decisions.add("threads per training rank", threads[0], reason)
    decisions.add("threads per engine rank", threads[1], reason)
    return threads[0], threads[1]
