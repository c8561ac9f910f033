"""Config and machine -> plan: every ``auto`` resolved, every process counted. Pure: it starts and imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slime_like.cluster.machine import Machine, probe_machine
from slime_like.cluster.plan_roles import critic_spec, role_bytes, role_devices, teacher_spec, teacher_swap
from slime_like.config.algo import SftConfig
from slime_like.config.deterministic import check_bits
from slime_like.config.files import family_of
from slime_like.config.hf import HfConfig, check_weights, read_hf_config
from slime_like.config.model import OptimConfig, ParallelConfig
from slime_like.config.pipeline import segments
from slime_like.config.resolved import ActorSpec, CriticSpec, EngineSpec, Layout, TeacherSpec, TransportSpec
from slime_like.config.root import TrainConfig
from slime_like.config.rules import batch_identity, samples_per_rollout, trainer_ranks
from slime_like.config.schedule import settle_schedule
from slime_like.errors import ConfigError

__all__ = ["Decision", "Machine", "Plan", "Role", "make_plan", "probe_machine"]

PROCESS_BYTES = 600 * 2**20  # resident memory of a process that has imported torch, before any weights
MAX_THREADS = 16
# Float32 engines and trainers differ by the order of their sums alone: a few 1e-6 per layer. Bfloat16 has 8 bits of
# mantissa, each layer rounds, and the largest of some hundred log-probabilities strays by up to a tenth; weights that
# did not arrive are off by far more.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that the config leaves open, what it became, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Role:
    """Processes of one kind; ``devices[i]`` are the GPUs of process i (of the run's, counted from 0), none on CPU."""

    name: str
    devices: tuple[tuple[int, ...], ...]
    layout: Layout | None = None  # of Megatron ranks


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where, with every number settled."""

    device: str  # cpu | cuda
    actor: ActorSpec
    critic: CriticSpec | None
    teacher: TeacherSpec | None  # None also where it is scored on the actor's ranks
    engines: tuple[EngineSpec, ...]  # empty where nothing is generated
    transport: TransportSpec
    needs_trainer: bool
    colocated: bool  # trainer and engines on the same devices; also where only one of them runs
    num_gpus: int
    threads_per_process: int
    max_context_len: int
    samples_per_rollout: int
    samples_per_step: int
    probe_tolerance: float
    run_dir: str
    roles: tuple[Role, ...]
    decisions: tuple[Decision, ...]

    @property
    def summary(self) -> str:
        """What is started, in one line."""
        counts = {role.name: len(role.devices) for role in self.roles}
        parts = [f"{n} {name if name == 'engine' else f'{name} rank'}{'s' * (n > 1)}" for name, n in counts.items()]
        return f"starting {' and '.join(parts)} on {self.device}"

    @property
    def needs_engines(self) -> bool:
        """Whether anything is generated."""
        return bool(self.engines)


def make_plan(cfg: TrainConfig, machine: Machine) -> Plan:
    """Resolve ``cfg`` for ``machine``. Raises ``ConfigError`` where it cannot hold what the config asks for.

    Reads config.json and weight headers of ``model.hf_checkpoint``; they may be missing when ``run.prepare`` makes them.
    """
    notes = _Notes([])
    model = _model(cfg)
    device = _device(cfg, machine, notes)
    dtype = cfg.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        notes.add("model.dtype", dtype, f"placement.device is {device}")
    context = _context(cfg, model, notes)
    actor = _actor(cfg, model, device, dtype, notes)
    supervised = isinstance(cfg.algo, SftConfig)
    needs_trainer = cfg.run.mode != "rollout_only"
    critic = critic_spec(cfg, actor, notes.add) if needs_trainer else None
    teacher = teacher_spec(cfg, actor) if needs_trainer else None
    needs_engines = cfg.run.mode != "train_only" and not supervised
    engines = _engines(cfg, device, dtype, context) if needs_engines else ()
    colocated = cfg.placement.mode == "colocated" or not (needs_trainer and needs_engines)
    roles = _roles(cfg, actor, engines, needs_trainer=needs_trainer, colocated=colocated, device=device)
    roles = _beside(cfg, roles, critic, teacher, device)
    num_gpus = len({index for role in roles for devices in role.devices for index in devices})
    beside = role_bytes(critic, teacher, PROCESS_BYTES)
    _fits(cfg, machine, model, roles, device=device, num_gpus=num_gpus, beside=beside)
    return Plan(
        device=device,
        actor=actor,
        critic=critic,
        teacher=teacher,
        engines=engines,
        transport=_transport(cfg, device, notes),
        needs_trainer=needs_trainer,
        colocated=colocated,
        num_gpus=num_gpus,
        threads_per_process=_threads(cfg, machine, roles, device, notes),
        max_context_len=context,
        samples_per_rollout=samples_per_rollout(cfg),
        samples_per_step=batch_identity(cfg),
        probe_tolerance=_tolerance(cfg, device, dtype, notes),
        run_dir=str(Path(cfg.run.dir).resolve()),
        roles=roles,
        decisions=tuple(notes.decisions),
    )


@dataclass(frozen=True, slots=True)
class _Notes:
    decisions: list[Decision]

    def add(self, key: str, value: object, reason: str) -> None:
        self.decisions.append(Decision(key, str(value), reason))


def _model(cfg: TrainConfig) -> HfConfig | None:
    if cfg.run.prepare is not None and not Path(cfg.model.hf_checkpoint).exists():
        return None
    return read_hf_config("model.hf_checkpoint", cfg.model.hf_checkpoint)


def _device(cfg: TrainConfig, machine: Machine, notes: _Notes) -> str:
    device = cfg.placement.device
    if device == "auto":
        device = "cuda" if machine.num_gpus else "cpu"
        notes.add("placement.device", device, f"{machine.num_gpus} GPUs are visible")
    if device == "cuda" and not machine.num_gpus and cfg.placement.ray_address is None:
        raise ConfigError(
            "placement.device=cuda, but no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES): set placement.device=cpu"
        )
    return device


def _context(cfg: TrainConfig, model: HfConfig | None, notes: _Notes) -> int:
    if cfg.rollout.max_context_len is not None:
        return cfg.rollout.max_context_len
    if model is None:
        raise ConfigError(
            f"rollout.max_context_len is open and model.hf_checkpoint={cfg.model.hf_checkpoint!r} does not exist yet: "
            "set rollout.max_context_len"
        )
    notes.add("rollout.max_context_len", model.max_positions, f"max_position_embeddings of {model.folder}")
    return model.max_positions


def _actor(cfg: TrainConfig, model: HfConfig | None, device: str, dtype: str, notes: _Notes) -> ActorSpec:
    p, loop = cfg.parallel, cfg.loop
    world = trainer_ranks(cfg)
    if cfg.placement.actor_num_gpus_per_node is None:
        per_node = world // cfg.placement.actor_num_nodes
        notes.add("placement.actor_num_gpus_per_node", per_node, "tp * pp * cp: one copy of the model")
    dp = world // (p.tp * p.pp * p.cp)
    notes.add("data parallel size", dp, f"{world} ranks / (tp {p.tp} * pp {p.pp} * cp {p.cp})")
    if loop.global_batch_size is None:
        notes.add("loop.global_batch_size", batch_identity(cfg), "samples per rollout / loop.steps_per_rollout")
    if p.sequence_parallel and p.tp == 1:
        notes.add("parallel.sequence_parallel", "false", "parallel.tp is 1")
    steps = (loop.num_rollout - cfg.critic.warmup_rollouts) * loop.steps_per_rollout
    optim = _optim(cfg, device, dtype, dp, notes)
    settled = replace(
        cfg.model,
        dtype=dtype,
        family=cfg.model.family if model is None else family_of(cfg, model),
        ref_checkpoint=cfg.model.ref_checkpoint or cfg.model.megatron_checkpoint or cfg.model.hf_checkpoint,
    )
    if cfg.model.family == "auto":
        reason = "made by run.prepare" if model is None else f"model_type of {model.folder}"
        notes.add("model.family", settled.family, reason)
    for config in (settled, optim):
        config.seal()
    spec = ActorSpec(
        model=settled,
        optim=optim,
        algo=cfg.algo,
        layout=_layout(p, dp, model, notes),
        device=device,
        dtype=dtype,
        temperature=1.0 if isinstance(cfg.algo, SftConfig) else cfg.rollout.temperature,
        num_steps=steps,
        steps_per_rollout=loop.steps_per_rollout,
        max_tokens_per_rank=p.max_tokens_per_rank,
        seed=cfg.run.seed,
        deadline_s=loop.step_deadline_s,
        deterministic=cfg.run.deterministic,
        teacher_checkpoint=teacher_swap(cfg, notes.add),
    )
    if cfg.run.deterministic and device == "cpu":
        check_bits(cfg, settled.family, dtype)
    if spec.needs_reference and cfg.model.ref_checkpoint is None:
        notes.add("model.ref_checkpoint", settled.ref_checkpoint, "the policy's own start")
    return spec


def _optim(cfg: TrainConfig, device: str, dtype: str, dp: int, notes: _Notes) -> OptimConfig:
    """The schedule in optimizer steps, and a note on every option that has no effect in this run."""
    steps = (cfg.loop.num_rollout - cfg.critic.warmup_rollouts) * cfg.loop.steps_per_rollout
    if cfg.run.mode == "rollout_only":
        return cfg.optim
    optim, parallel = settle_schedule(cfg.optim, steps), cfg.parallel
    if cfg.optim.decay_steps is None and optim.schedule != "constant":
        notes.add("optim.decay_steps", steps, "loop.num_rollout * loop.steps_per_rollout")
    if cfg.optim.wsd_decay_steps is None and optim.wsd_decay_steps is not None:
        notes.add("optim.wsd_decay_steps", optim.wsd_decay_steps, "a tenth of optim.decay_steps")
    if cfg.optim.warmup_fraction is not None:
        notes.add("optim.warmup_steps", optim.warmup_steps, f"{cfg.optim.warmup_fraction:g} of {optim.decay_steps}")
    if optim.cpu_offload and device == "cpu":
        notes.add("optim.cpu_offload", "no effect", "placement.device is cpu: optimizer state is in host memory anyway")
    if optim.cpu_offload and device == "cuda" and dtype == "float32":
        raise ConfigError(
            "optim.cpu_offload=true with model.dtype=float32: megatron's offload keeps main weights beside 16-bit ones; "
            "set model.dtype=bfloat16, or optim.cpu_offload=false"
        )
    if parallel.overlap_grad_reduce and dp * parallel.cp == 1:
        notes.add("parallel.overlap_grad_reduce", "no effect", "one data parallel rank: nothing is reduced")
    elif parallel.overlap_param_gather and cfg.loop.steps_per_rollout == 1:
        reason = "loop.steps_per_rollout is 1: the push reads all weights after every optimizer step"
        notes.add("parallel.overlap_param_gather", "no effect", reason)
    return optim


def _layout(p: ParallelConfig, dp: int, model: HfConfig | None, notes: _Notes) -> Layout:
    """The trainer's layout; the pipeline's segments are open while ``run.prepare`` has yet to make the model."""
    split = segments(p, model.num_layers) if model is not None else ()
    if len(set(split)) > 1 or len(split) > p.pp:
        given = {
            "vpp": p.vpp if p.vpp > 1 else None,
            "layers_per_virtual_stage": p.layers_per_virtual_stage,
            "first_stage_layers": p.first_stage_layers,
            "last_stage_layers": p.last_stage_layers,
            "pipeline_layout": p.pipeline_layout,
        }
        keys = ", ".join(f"parallel.{key} {value}" for key, value in given.items() if value is not None)
        notes.add("layers per pipeline segment", " ".join(map(str, split)), keys or f"parallel.pp {p.pp} leaves a rest")
    return Layout(
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        dp=dp,
        ep=p.ep,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        distributed_optimizer=p.distributed_optimizer,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        bucket_size=p.bucket_size,
        vpp=len(split) // p.pp if split else p.vpp,
        segments=split,
    )


def _engines(cfg: TrainConfig, device: str, dtype: str, context: int) -> tuple[EngineSpec, ...]:
    rollout, logs = cfg.rollout, Path(cfg.run.dir).resolve() / "logs"
    return tuple(
        EngineSpec(
            model_path=cfg.model.hf_checkpoint,
            device=device,
            dtype=dtype,
            tp=rollout.tp,
            context_length=context,
            seed=cfg.run.seed + index,
            log_path=str(logs / f"engine_{index}.log"),
            start_deadline_s=rollout.start_deadline_s,
            request_deadline_s=rollout.request_deadline_s,
            max_running_requests=rollout.max_running_requests,
            deterministic=cfg.run.deterministic,
            cpu_kernels=rollout.cpu_kernels,
            sglang=dict(rollout.sglang),
        )
        for index in range(rollout.num_engines)
    )


def _roles(
    cfg: TrainConfig,
    actor: ActorSpec,
    engines: tuple[EngineSpec, ...],
    *,
    needs_trainer: bool,
    colocated: bool,
    device: str,
) -> tuple[Role, ...]:
    """Trainer ranks take GPUs 0, 1, ...; engines the same ones when colocated, the following ones when split."""
    world = actor.layout.world_size if needs_trainer else 0
    ranks = tuple((rank,) for rank in range(world))
    first = 0 if colocated else world
    served = tuple(tuple(range(first + i * e.tp, first + (i + 1) * e.tp)) for i, e in enumerate(engines))
    if device == "cuda" and colocated and world and engines and served[-1][-1] >= world:
        raise ConfigError(
            f"rollout.num_engines {len(engines)} * rollout.tp {cfg.rollout.tp} = {len(engines) * cfg.rollout.tp} GPUs, "
            f"but the trainer they share has {world}: set rollout.num_engines={max(1, world // cfg.rollout.tp)}, "
            f"placement.actor_num_gpus_per_node, or placement.mode=split"
        )
    if device == "cpu":
        ranks, served = tuple(() for _ in ranks), tuple(() for _ in served)
    roles = (Role("trainer", ranks, actor.layout), Role("engine", served))
    return tuple(role for role in roles if role.devices)


def _beside(
    cfg: TrainConfig,
    roles: tuple[Role, ...],
    critic: CriticSpec | None,
    teacher: TeacherSpec | None,
    device: str,
) -> tuple[Role, ...]:
    """``roles`` with a critic and a teacher, if there are any; on devices of their own they follow the others."""
    trainers = len(roles[0].devices)
    for name, spec, placement in (
        ("critic", critic, cfg.critic.placement),
        ("teacher", teacher, cfg.teacher.placement),
    ):
        if spec is not None:
            layout = spec.rank.layout
            free = 1 + max((i for role in roles for devices in role.devices for i in devices), default=-1)
            devices = role_devices(name, placement, layout, device=device, trainers=trainers, first_free=free)
            roles = (*roles, Role(name, devices, layout))
    return roles


def _fits(
    cfg: TrainConfig,
    machine: Machine,
    model: HfConfig | None,
    roles: tuple[Role, ...],
    *,
    device: str,
    num_gpus: int,
    beside: int,
) -> None:
    """Raise ``ConfigError`` where the machine is too small; a joined Ray cluster is known only when it answers."""
    if cfg.placement.ray_address is not None:
        return
    if device == "cuda":
        if num_gpus > machine.num_gpus:
            needs = ", ".join(f"{role.name}s {sum(map(len, role.devices))}" for role in roles)
            raise ConfigError(
                f"the run needs {num_gpus} GPUs ({needs}; placement.mode={cfg.placement.mode}), {machine.num_gpus} are "
                "visible: lower parallel.*, placement.actor_num_gpus_per_node or rollout.num_engines, "
                "or set placement.mode=colocated"
            )
        return
    needed = beside + _cpu_bytes(cfg, model, {role.name: len(role.devices) for role in roles})
    if needed > machine.memory_bytes:
        raise ConfigError(
            f"the run needs about {needed / 2**30:.1f} GiB of memory (weights, gradients, optimizer, engines and "
            f"{sum(len(role.devices) for role in roles)} processes), this machine has "
            f"{machine.memory_bytes / 2**30:.1f} GiB: choose a smaller model or layout, or fewer engines"
        )


def _cpu_bytes(cfg: TrainConfig, model: HfConfig | None, processes: dict[str, int]) -> int:
    """A lower bound: processes, float32 weights, gradients and two moments per copy of the model, engine weights."""
    params = 0 if model is None else check_weights("model.hf_checkpoint", model.folder)
    copies = processes.get("trainer", 0) // (cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp)
    engines = processes.get("engine", 0)
    optimizer = 8 if cfg.parallel.distributed_optimizer else 8 * copies
    weights = params * ((8 * copies + optimizer if copies else 0) + 4 * engines)
    ranks = processes.get("trainer", 0) + engines * cfg.rollout.tp
    return weights + ranks * PROCESS_BYTES


def _transport(cfg: TrainConfig, device: str, notes: _Notes) -> TransportSpec:
    kind = cfg.weights.transport
    if kind == "auto":
        kind = "tensor" if cfg.placement.mode == "colocated" else "broadcast"
        notes.add("weights.transport", kind, f"placement.mode is {cfg.placement.mode}")
    backend = "nccl" if device == "cuda" else "gloo"
    return TransportSpec(kind, backend, int(cfg.weights.bucket_mb * 2**20), cfg.weights.push_deadline_s)


def _threads(cfg: TrainConfig, machine: Machine, roles: tuple[Role, ...], device: str, notes: _Notes) -> int:
    if cfg.run.deterministic and device == "cpu":
        notes.add("threads per process", 1, "run.deterministic: threads share sums out by shape")
        return 1
    engines = sum(len(role.devices) * cfg.rollout.tp for role in roles if role.name == "engine")
    sizes = [engines, sum(len(role.devices) for role in roles if role.name != "engine")]
    # Synchronous trainers and engines take turns; otherwise all processes are busy at once.
    busy = max(sizes) if cfg.loop.max_staleness == 0 else sum(sizes)
    threads = max(1, min(MAX_THREADS, machine.cpu_count // busy))
    notes.add("threads per process", threads, f"{machine.cpu_count} cores, up to {busy} busy processes")
    return threads


def _tolerance(cfg: TrainConfig, device: str, dtype: str, notes: _Notes) -> float:
    if cfg.run.deterministic and device == "cpu":
        notes.add("weights.probe_tolerance", 0.0, "run.deterministic: engine and trainer agree in every bit")
        return 0.0
    if cfg.weights.probe_tolerance is not None:
        return cfg.weights.probe_tolerance
    notes.add("weights.probe_tolerance", PROBE_TOLERANCE[dtype], f"rounding of {dtype}")
    return PROBE_TOLERANCE[dtype]
