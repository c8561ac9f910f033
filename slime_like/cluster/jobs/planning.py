"""Check a command line of ``train.py`` against the nodes of a cluster before submitting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_like.cluster.jobs.layout import JOINED
from slime_like.cluster.plan.assignment import assign
from slime_like.cluster.plan.engine_nodes import on_nodes
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, plan_on_nodes
from slime_like.cluster.plan.shapes import model_config
from slime_like.config.load.compat import translate
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_model
from slime_like.config.rules.schedule import without_schedule
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError, MissingResources
from slime_like.hardware import known_gpu
from slime_like.util.counted import counted

MAX_GPUS = 16_000


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Config of a job, and lines that describe the cluster and the plan of the job on it."""

    cfg: TrainConfig
    lines: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def plan_job(arguments: Sequence[str], nodes: Sequence[ClusterNode], *, grows: bool = False) -> JobPlan:
    """Return the config and the plan of the run that ``arguments`` start, for the cluster's ``nodes``.

    Weights, tokenizer and data are not checked: they are on the cluster, and the run checks them when it starts. If
    the model's config.json cannot be read on this machine and is not in the planner's table, only the run's config is
    checked. GPUs used by other jobs count as free.

    Raises ``ConfigError`` if ``arguments`` are invalid or start no run, if ``nodes`` is empty or if the run does not fit;
    ``ConfigError`` or ``CheckpointError`` if the model cannot run with the config; and ``MissingResources`` if the cluster
    lacks nodes or GPUs. With ``grows``, missing resources are only a warning: nodes will join, and the run waits for them.
    """
    command = translate(arguments)
    if command.action != "train":
        raise ConfigError(
            f"--{command.action} does not start a run: remove --{command.action}, or pass it to train.py on a machine of your own"
        )
    cfg = load_config([*arguments, JOINED], files=False, machine=False, code=False)
    if not nodes:
        raise ConfigError("the cluster has no live node: wait until its nodes have joined (`ray status`)")
    machine = _machine(nodes)
    num_cpus = sum(node.num_cpus for node in nodes)
    cluster = f"cluster: {counted(len(nodes), 'node')}, {counted(machine.num_gpus, 'GPU')}, {counted(num_cpus, 'CPU')}"
    try:
        model = model_config(cfg, machine)
    except CheckpointError as error:
        return JobPlan(cfg, (cluster,), (f"not planned: {error}",))
    if model is not None:
        check_model(cfg, model)
    plan = make_plan(without_schedule(cfg), _enough_gpus(cfg, machine))
    try:
        assignment = assign(cfg, plan, nodes)
    except MissingResources as error:
        if not grows:
            raise MissingResources(f"{error}; if nodes will join, pass --grows") from error
        limit = f"placement.wait_deadline_s={cfg.placement.wait_deadline_s:g}"
        waits = f"not planned, since the run waits for nodes, at most {limit}: {error}"
        return JobPlan(cfg, (cluster,), (waits, *_device_warning(cfg, machine, grows)))
    plan = replace(plan, engines=on_nodes(plan.engines, assignment.nodes_per_engine))
    cluster_plan = plan_on_nodes(cfg, plan, assignment.used(nodes), is_driver=False)
    warnings = (*cluster_plan.plan.advice, *cluster_plan.warnings, *_device_warning(cfg, machine, grows))
    return JobPlan(cfg, (cluster, cluster_plan.plan.summary), warnings)


def _device_warning(cfg: TrainConfig, machine: Machine, grows: bool) -> tuple[str, ...]:
    """Return a warning if ``placement.device=auto`` selects the CPU while GPU nodes may still join (``grows``)."""
    if not grows or machine.num_gpus or cfg.placement.device != "auto":
        return ()
    return (
        "placement.device=auto selects cpu, as no node has a GPU: if nodes with GPUs will join, set placement.device=cuda",
    )


def _enough_gpus(cfg: TrainConfig, machine: Machine) -> Machine:
    """Return ``machine`` as one node with more GPUs and main memory than any run needs.

    Planning then does not stop at missing resources, and ``assign`` names the missing GPUs. The GPUs are all of the kind
    that has the most memory in the cluster, or of an unknown kind if there is one; ``plan_on_nodes`` checks the memory of the
    nodes that the run uses. For a run on CPUs, return ``machine`` unchanged.
    """
    if cfg.placement.device == "cpu" or (cfg.placement.device == "auto" and not machine.num_gpus):
        return machine
    kinds = {name: known_gpu(name) for name in machine.gpu_names}
    sizes = {name: float("inf") if kind is None else kind.memory for name, kind in kinds.items()}
    largest = (max(sizes, key=lambda name: sizes[name]),) if sizes else ()
    return replace(machine, num_gpus=MAX_GPUS, gpu_names=largest, memory_bytes=2**62, nodes=1)


def _machine(nodes: Sequence[ClusterNode]) -> Machine:
    """Return one machine that describes all nodes with GPUs, with the fewest CPUs and the least memory of any of them.

    If no node has a GPU, it describes all nodes, with the fewest CPUs of any node and the memory of all nodes together.
    """
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
