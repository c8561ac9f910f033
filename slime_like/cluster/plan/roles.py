"""Plan of critic and teacher: models, layouts and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slime_like.checkpoint.record import critic_source
from slime_like.config.rules.hf import read_hf_config
from slime_like.config.rules.roles import shape_difference
from slime_like.config.rules.schedule import resolve_schedule
from slime_like.config.rules.weight_files import check_weights
from slime_like.config.schema.resolved import CriticSpec, Layout, RankSpec, TeacherSpec
from slime_like.config.schema.role_algo import DistillConfig, PpoConfig
from slime_like.config.schema.roles import CriticConfig, TeacherConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.trainer import GRADIENT_BYTES, MAIN_BYTES, MOMENT_BYTES, PARAMETER_BYTES

Note = Callable[[str, object, str], None]  # key, value, reason


def critic_spec(cfg: TrainConfig, actor: RankSpec, note: Note) -> CriticSpec | None:
    """Return the spec of the critic of algo=ppo; None for other algorithms."""
    if not isinstance(cfg.algo, PpoConfig):
        return None
    critic, loop = cfg.critic, cfg.loop
    folder = critic.hf_checkpoint or actor.model.hf_checkpoint
    key = "model.hf_checkpoint" if critic.hf_checkpoint is None else "critic.hf_checkpoint"
    rate = actor.optim.lr if critic.lr is None else critic.lr
    if critic.lr is None:
        note("critic.lr", rate, "optim.lr")
    if critic.load is None:
        note("critic.load", "a fresh value head", f"on the body of {folder}")
    steps = loop.num_rollout * loop.steps_per_rollout
    optim = replace(
        actor.optim,
        lr=rate,
        min_lr=min(actor.optim.min_lr, rate),
        warmup_steps=critic.lr_warmup_steps,
        decay_steps=cfg.optim.decay_steps,
        wsd_decay_steps=cfg.optim.wsd_decay_steps,
    )
    optim = resolve_schedule(optim, steps, warmup_key="critic.lr_warmup_steps")
    optim.seal()
    rank = replace(
        _rank(actor, "critic", critic.hf_checkpoint, role_layout(cfg, critic, actor.layout, key, folder)),
        optim=optim,
        num_steps=steps,
    )
    source = None if critic.load is None else str(critic_source(Path(critic.load)).resolve())
    return CriticSpec(rank, critic.value_clip, source, critic.warmup_rollouts)


def teacher_swap(cfg: TrainConfig, note: Note) -> str | None:
    """Return the teacher's checkpoint if the actor's ranks score with the teacher by swapping in its weights, else None."""
    teacher = cfg.teacher
    if not isinstance(cfg.algo, DistillConfig) or teacher.hf_checkpoint is None:
        return None
    if teacher.placement in ("swap", "colocated", "split"):
        return teacher.hf_checkpoint if teacher.placement == "swap" else None
    if not Path(cfg.model.hf_checkpoint).exists():
        note("teacher.placement", "colocated", "model.hf_checkpoint does not exist yet, so shapes cannot be compared")
        return None
    difference = shape_difference(cfg.model.hf_checkpoint, teacher.hf_checkpoint)
    if difference is None and all(getattr(teacher, name) is None for name in ("tp", "pp", "cp", "dp")):
        note("teacher.placement", "swap", "the teacher has the policy's shape")
        return teacher.hf_checkpoint
    note(
        "teacher.placement",
        "colocated",
        f"the teacher has another {difference}" if difference else "it has its own layout",
    )
    return None


def teacher_spec(cfg: TrainConfig, actor: RankSpec) -> TeacherSpec | None:
    """Return the spec of the teacher of algo=distill if it has ranks of its own, else None."""
    teacher = cfg.teacher
    if not isinstance(cfg.algo, DistillConfig) or teacher.hf_checkpoint is None or actor.swaps_teacher:
        return None
    folder = teacher.hf_checkpoint
    layout = role_layout(cfg, teacher, actor.layout, "teacher.hf_checkpoint", folder)
    return TeacherSpec(_rank(actor, "teacher", folder, layout))


def _rank(actor: RankSpec, role: str, folder: str | None, layout: Layout) -> RankSpec:
    """Return the spec of a rank of ``role``, with the actor's checkpoint if ``folder`` is None."""
    guard = replace(actor.guard, name=role)
    if folder is None:
        return replace(actor, layout=layout, guard=guard)
    model = replace(actor.model, hf_checkpoint=folder, family="auto")
    model.seal()
    return replace(actor, model=model, model_key=f"{role}.hf_checkpoint", layout=layout, guard=guard)


def role_layout(cfg: TrainConfig, role: CriticConfig | TeacherConfig, actor: Layout, key: str, folder: str) -> Layout:
    """Return the actor's layout with the parallel sizes that ``role`` sets, and an even pipeline without virtual stages.

    ``folder`` contains the role's model; ``key`` is the config key that names it. The model's experts are distributed like the
    actor's if their number and width and the number of ranks allow it.
    """
    tp, pp = role.tp or actor.tp, role.pp or actor.pp
    cp, dp = role.cp or actor.cp, role.dp or actor.dp
    sequence_parallel = cfg.parallel.sequence_parallel and tp > 1
    experts, width = actor.ep, actor.etp
    if Path(folder).exists():
        model = read_hf_config(key, folder)
        experts, width = model.num_experts, model.expert_width
    stage = tp * cp * dp
    ep = actor.ep if experts and experts % actor.ep == 0 and stage % actor.ep == 0 else 1
    etp = actor.etp if experts and width % actor.etp == 0 and stage % (ep * actor.etp) == 0 else 1
    return replace(
        actor, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp, sequence_parallel=sequence_parallel, vpp=1, segments=()
    )


def role_devices(
    name: str, placement: str, layout: Layout, *, device: str, trainers: int, first_free: int
) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each rank of a role; no GPUs if ``device`` is cpu.

    If ``placement`` is split, the role has GPUs of its own, from index ``first_free`` on. Otherwise, it shares the trainer's
    GPUs; raises ``ConfigError`` if it has more ranks than the trainer has GPUs.
    """
    world = layout.world_size
    if device == "cpu":
        return tuple(() for _ in range(world))
    if placement == "split":
        return tuple((first_free + rank,) for rank in range(world))
    if world > trainers:
        raise ConfigError(
            f"{name}.tp {layout.tp} * {name}.pp {layout.pp} * {name}.cp {layout.cp} * {name}.dp {layout.dp} = {world} "
            f"ranks do not fit the trainer's {trainers} GPUs: lower {name}.dp or the other sizes, or set {name}.placement=split"
        )
    return tuple((rank,) for rank in range(world))


def role_bytes(critic: CriticSpec | None, teacher: TeacherSpec | None, process_bytes: int) -> int:
    """Return an estimate of the bytes of critic and teacher on a CPU: processes, weights and the critic's training state.

    Copies of weights and state count as in ``trained_bytes``. Activations do not count.
    """
    num_bytes = 0
    for spec in (critic, teacher):
        if spec is not None:
            layout, dtype, folder = spec.rank.layout, spec.rank.dtype, spec.rank.model.hf_checkpoint
            parameters = check_weights(spec.rank.model_key, folder) if Path(folder).exists() else 0
            weights = model_copies(layout) * parameters * PARAMETER_BYTES[dtype]
            num_bytes += layout.world_size * process_bytes
            num_bytes += weights if spec is teacher else trained_bytes(layout, dtype, parameters)
    return num_bytes


def trained_bytes(layout: Layout, dtype: str, num_parameters: int) -> int:
    """Return the bytes of weights, gradients and optimizer state of a model in ``dtype``, summed over its ranks.

    Weights and gradients count once per copy of the model. The optimizer state counts once if it is sharded
    (``parallel.distributed_optimizer``), else also once per copy.
    """
    copies = model_copies(layout)
    optimizer = MOMENT_BYTES + (MAIN_BYTES if dtype == "bfloat16" else 0)
    optimizer *= 1 if layout.distributed_optimizer else copies
    return num_parameters * (copies * (PARAMETER_BYTES[dtype] + GRADIENT_BYTES) + optimizer)


def model_copies(layout: Layout) -> int:
    """Return a lower bound of the number of copies of each parameter: the ranks of a stage, divided by the largest sharding."""
    return layout.world_size // (layout.pp * max(layout.tp * layout.cp, layout.ep * layout.etp))
