"""Checks of a command line against the nodes of a cluster, before it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.cluster.jobs.layout import JOINED
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, plan_on_nodes
from slime_like.cluster.plan.shapes import model_config
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_model
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError
from slime_like_compat.flags.translate import translate


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The config of a job, and lines about its plan on the cluster."""

    cfg: TrainConfig
    lines: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def plan_job(arguments: Sequence[str], nodes: Sequence[ClusterNode]) -> JobPlan:
    """Load the config of ``arguments`` and plan it on ``nodes``.

    Weights, tokenizer and data are on the cluster, where the run checks them when it starts. If there is
    no config.json here and the planner's table does not have the model, only the config is checked.
    Raises ``ConfigError`` if the run does not fit.
    """
    command = translate(arguments)
    if command.action != "train":
        raise ConfigError(f"--{command.action} starts no run: use train.py, without a job")
    cfg = load_config([*arguments, JOINED], files=False, machine=False, code=False)
    if not nodes:
        raise ConfigError("the cluster has no live node: wait until its nodes have joined (`ray status`)")
    machine = _machine(nodes)
    cluster = f"{len(nodes)} nodes, {machine.num_gpus} GPUs, {sum(node.num_cpus for node in nodes)} CPUs"
    try:
        model = model_config(cfg, machine)
    except CheckpointError as error:
        return JobPlan(cfg, (f"cluster: {cluster}",), (f"not planned: {error}",))
    if model is not None:
        check_model(cfg, model)
    planned = plan_on_nodes(cfg, make_plan(cfg, machine), nodes)
    return JobPlan(cfg, (f"cluster: {cluster}", planned.plan.summary), (*planned.plan.advice, *planned.warnings))


def _machine(nodes: Sequence[ClusterNode]) -> Machine:
    """Return the nodes as one described machine, with the CPUs of the smallest node that a rank or engine may run on."""
    with_gpus = [node for node in nodes if node.num_gpus]
    used_nodes = with_gpus or list(nodes)
    return Machine(
        num_gpus=sum(node.num_gpus for node in nodes),
        cpu_count=max(1, min(node.num_cpus for node in used_nodes)),
        memory_bytes=sum(node.memory_bytes for node in used_nodes)
        if not with_gpus
        else min(node.memory_bytes for node in used_nodes),
        gpu_names=tuple(node.gpu_name for node in with_gpus),
        is_local=False,
        nodes=len(used_nodes),
    )
