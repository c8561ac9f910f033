"""Advice on valid but probably unintended settings, such as idle devices and uninformative evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import Role
from slime_like.config.rules.managers import engines_setting
from slime_like.config.rules.tree import samples_per_step
from slime_like.config.schema.root import TrainConfig
from slime_like.data.heldout import eval_sets


def advice(cfg: TrainConfig, machine: Machine, roles: tuple[Role, ...], device: str) -> tuple[str, ...]:
    """Return one sentence per problem, with the key to change. Idle GPUs are not reported if the run joins a Ray cluster."""
    check_gpus = device == "cuda" and cfg.placement.ray_address is None
    return (*_nodes(cfg, machine), *(_idle_gpus(cfg, machine, roles) if check_gpus else ()), *_evaluation(cfg))


def _nodes(cfg: TrainConfig, machine: Machine) -> Iterator[str]:
    """Report that the plan is for several nodes although the run would use only one of them."""
    if machine.nodes > 1 and cfg.placement.ray_address is None:
        yield (
            f"placement.ray_address=null starts Ray on one machine, but the plan is for {machine.nodes} nodes: start Ray on "
            "them and set placement.ray_address=auto or its address"
        )


def _idle_gpus(cfg: TrainConfig, machine: Machine, roles: tuple[Role, ...]) -> Iterator[str]:
    """Report GPUs without a process and, if trainer and engines share GPUs, trainer GPUs that idle during rollouts."""
    devices_of_role = {role.name: {index for devices in role.devices for index in devices} for role in roles}
    used_devices = set[int]().union(*devices_of_role.values())
    trainer, engines = devices_of_role.get("trainer", set()), devices_of_role.get("engine", set())
    colocated = bool(trainer & engines)
    num_idle = machine.num_gpus - len(used_devices)
    if num_idle > 0:
        fix = _use_all(cfg, machine.num_gpus, colocated, len(trainer))
        yield f"{num_idle} of {machine.num_gpus} GPUs would idle: {fix}, or hide them with CUDA_VISIBLE_DEVICES"
    if colocated and engines < trainer:
        yield (
            f"the engines serve on {len(engines)} of the trainer's {len(trainer)} GPUs, so the other GPUs idle during "
            f"rollouts: set {_more_engines(cfg, len(trainer))}"
        )


def _use_all(cfg: TrainConfig, gpus: int, colocated: bool, trainers: int) -> str:
    """Return a hint on how to use more of the ``gpus`` GPUs: settings with their values if known, else the keys to raise."""
    if not trainers:
        return f"set {_more_engines(cfg, gpus)}"
    if not colocated:
        return "raise rollout.num_engines or placement.actor_num_gpus_per_node"
    model = cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp
    ranks = min(gpus // model, samples_per_step(cfg)) * model
    if ranks <= trainers:
        return "raise rollout.batch_size (each data-parallel rank needs a sample per step) or parallel.*"
    return (
        f"set placement.actor_num_gpus_per_node={ranks} {engines_setting(cfg.rollout, max(1, ranks // cfg.rollout.tp))}"
    )


def _more_engines(cfg: TrainConfig, gpus: int) -> str:
    """Return settings that put the engines on more of the ``gpus`` GPUs."""
    rollout, max_engines = cfg.rollout, gpus // cfg.rollout.tp
    if max_engines == rollout.num_engines:
        return f"rollout.tp to a divisor of {gpus}"
    if max_engines < rollout.num_engines + rollout.num_managers:
        return f"rollout.num_engines={max_engines}, and rollout.num_managers to a divisor of it"
    return engines_setting(rollout, max_engines)


def _evaluation(cfg: TrainConfig) -> Iterator[str]:
    """Report evaluations whose samples are identical, and an evaluation interval without datasets."""
    for heldout in eval_sets(cfg.evaluation):
        n = heldout.n_samples_per_prompt
        if n > 1 and (heldout.temperature == 0 or heldout.top_k == 1):
            greedy = "temperature 0" if heldout.temperature == 0 else "top_k 1"
            yield (
                f"evaluation of {heldout.name} draws {n} samples per prompt at {greedy}: the samples are equal, so pass@{n} equals "
                "pass@1; set evaluation.temperature (1.0 is usual) or evaluation.n_samples_per_prompt=1"
            )
    if cfg.evaluation.interval is not None and not cfg.evaluation.datasets:
        yield (
            f"evaluation.interval={cfg.evaluation.interval} evaluates nothing, because evaluation.datasets is empty: add a "
            "dataset, for example evaluation.datasets.heldout=heldout.jsonl"
        )
