"""Assignment of GPUs to processes, and checks that the run fits the machine."""

from __future__ import annotations

from pathlib import Path

from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.roles import role_devices, trained_bytes
from slime_like.cluster.plan.shapes import KEY, role_shapes
from slime_like.cluster.plan.types import Role, num_gpus
from slime_like.config.rules.hf import HfConfig
from slime_like.config.rules.managers import engines_setting
from slime_like.config.rules.weight_files import check_weights
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.shapes import ModelShape
from slime_like.planner.trainer import PARAMETER_BYTES

PROCESS_BYTES = 600 * 2**20  # resident memory of a process that has imported torch, before any weights


def rank_roles(
    cfg: TrainConfig,
    actor: RankSpec,
    engines: tuple[EngineSpec, ...],
    *,
    needs_trainer: bool,
    colocated: bool,
    device: str,
) -> tuple[Role, ...]:
    """Return the roles trainer and engine with their GPUs. A role that has no processes is left out.

    The trainer's ranks have GPUs 0, 1, ... Colocated engines share them; split engines have the following GPUs. On
    CPUs, no role has GPUs. Raises ``ConfigError`` if colocated engines need more GPUs than the trainer has.
    """
    world = actor.layout.world_size if needs_trainer else 0
    ranks = tuple((rank,) for rank in range(world))
    first = 0 if colocated else world
    engine_devices = tuple(tuple(range(first + i * e.tp, first + (i + 1) * e.tp)) for i, e in enumerate(engines))
    if device == "cuda" and colocated and world and engines and engine_devices[-1][-1] >= world:
        raise ConfigError(
            f"rollout.num_engines {len(engines)} * rollout.tp {cfg.rollout.tp} = {len(engines) * cfg.rollout.tp} GPUs, "
            f"but the trainer that they share has {world}: set {_fewer_engines(cfg, world)}, "
            f"placement.actor_num_gpus_per_node, or placement.mode=split"
        )
    if device == "cpu":
        ranks, engine_devices = tuple(() for _ in ranks), tuple(() for _ in engine_devices)
    roles = (Role("trainer", ranks, actor.layout), Role("engine", engine_devices))
    return tuple(role for role in roles if role.devices)


def _fewer_engines(cfg: TrainConfig, world: int) -> str:
    """Return settings that make the engines fit the ``world`` GPUs of the trainer."""
    tp = cfg.rollout.tp
    return engines_setting(cfg.rollout, max(1, world // tp)) + (f" rollout.tp={world}" if world < tp else "")


def add_roles(
    cfg: TrainConfig,
    roles: tuple[Role, ...],
    critic: CriticSpec | None,
    teacher: TeacherSpec | None,
    device: str,
) -> tuple[Role, ...]:
    """Return ``roles`` with the critic and the teacher added, if any.

    If one of them has GPUs of its own, these follow the GPUs of all roles before it.
    """
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


def check_fits(
    cfg: TrainConfig,
    machine: Machine,
    model: HfConfig | None,
    roles: tuple[Role, ...],
    engines: tuple[EngineSpec, ...],
    *,
    device: str,
    role_bytes: int,
) -> None:
    """Raise ``ConfigError`` if the machine has too few GPUs for the run or, in a run on CPUs, too little main memory.

    For a run that joins a Ray cluster, this machine is not checked; ``plan_on_nodes`` checks the cluster's nodes later.
    """
    if cfg.placement.ray_address is not None and machine.is_local:
        return
    if device == "cuda":
        needed_gpus = num_gpus(roles)
        if needed_gpus > machine.num_gpus:
            available = (
                f"only {machine.num_gpus} are visible" if machine.is_local else f"the nodes have {machine.num_gpus}"
            )
            needs = ", ".join(f"{role.name}s {sum(map(len, role.devices))}" for role in roles)
            split = ", or set placement.mode=colocated" if cfg.placement.mode == "split" else ""
            raise ConfigError(
                f"the run needs {needed_gpus} GPUs ({needs}; placement.mode={cfg.placement.mode}), but {available}: "
                "lower parallel.*, placement.actor_num_gpus_per_node or rollout.num_engines"
                f"{split}"
            )
        return
    needed_bytes = role_bytes + _cpu_bytes(cfg, model, roles, engines)
    if needed_bytes > machine.memory_bytes:
        memory = f"{machine.memory_bytes / 2**30:.1f} GiB"
        available = f"this machine has only {memory}" if machine.is_local else f"the nodes have {memory}"
        raise ConfigError(
            f"the run needs about {needed_bytes / 2**30:.1f} GiB of memory (weights, gradients, optimizer, engines and "
            f"{sum(len(role.devices) for role in roles)} processes), but {available}: "
            "choose a smaller model or layout, or fewer engines"
        )


def _cpu_bytes(
    cfg: TrainConfig, model: HfConfig | None, roles: tuple[Role, ...], engines: tuple[EngineSpec, ...]
) -> int:
    """Return an estimate of the memory of trainer and engines on a CPU in bytes: processes, trainer state, engine weights.

    Weights of remote experts count once per copy on the engines' machine. Activations and caches do not count.
    """
    is_written = model is not None and Path(model.folder).exists()
    params = check_weights(KEY, cfg.model.hf_checkpoint) if is_written else 0
    num_bytes = 0
    trainer = next((role for role in roles if role.name == "trainer"), None)
    if trainer is not None and trainer.layout is not None:
        dtype = "float32" if cfg.model.dtype == "auto" else cfg.model.dtype
        num_bytes += trained_bytes(trainer.layout, dtype, params) + len(trainer.devices) * PROCESS_BYTES
    shape = role_shapes(cfg, None, None).actor if params and engines else None
    for engine in engines:
        num_weights = params + (0 if shape is None else _remote_weights(shape, engine))
        num_bytes += num_weights * PARAMETER_BYTES[engine.dtype] + engine.tp * PROCESS_BYTES
    return num_bytes


def _remote_weights(shape: ModelShape, engine: EngineSpec) -> int:
    """Return the change in weights on the engine's machine that its remote experts cause.

    These leave the engine. If it starts its own workers and they run on the CPU, they have these experts; if it may
    do without its workers, it keeps a copy.
    """
    settings = engine_settings(engine)
    if shape.experts is None or not settings.remote_experts:
        return 0
    num_remote = shape.routed_parameters * settings.remote_experts // shape.experts.num_experts
    return num_remote * (settings.remote_on_host + settings.remote_copy - 1)
