"""Check and complete the plan of a run for the nodes of a joined Ray cluster (``placement.ray_address``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_like.cluster.plan.admission import add_admission_decision
from slime_like.cluster.plan.dcp import plan_dcp
from slime_like.cluster.plan.fit import PROCESS_BYTES, check_fits
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.memory import plan_memory
from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.roles import role_bytes
from slime_like.cluster.plan.shapes import model_config, role_shapes
from slime_like.cluster.plan.types import Decision, PlanDecisions, RoleShapes
from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.rollout import AUTO
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.hardware import known_gpu

ACCELERATOR = "accelerator_type:"  # prefix of Ray's resource with the kind of a node's GPUs


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Resources that a node of a Ray cluster reports."""

    address: str
    num_gpus: int
    num_cpus: int
    memory_bytes: int  # available when the node joined: Ray's memory and its object store
    gpu_name: str = ""  # the planner's or Ray's name; "" if the node reports none
    node_id: str = ""  # assigned by Ray
    num_taken_gpus: int = 0  # GPUs reserved by other jobs of the cluster

    @property
    def free_gpus(self) -> int:
        """Number of GPUs that no other job has reserved."""
        return max(0, self.num_gpus - self.num_taken_gpus)


def cluster_nodes(
    entries: Sequence[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]] | None = None
) -> tuple[ClusterNode, ...]:
    """Return the live nodes in ``entries``, which have the form of ``ray.nodes()``.

    ``available`` contains the free resources by Ray's node id. If it lacks a node, all GPUs of the node count as free.
    """
    nodes: list[ClusterNode] = []
    for entry in entries:
        resources: Mapping[str, float] = entry["Resources"] if entry["Alive"] else {}
        if resources:
            names = (name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))
            memory = resources.get("memory", 0) + resources.get("object_store_memory", 0)
            gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
            node_id = str(entry.get("NodeID", ""))
            free = (available or {}).get(node_id, resources).get("GPU", 0)
            gpu_name, num_reserved = _gpu_name(next(names, "")), gpus - int(free)
            address = entry["NodeManagerAddress"]
            nodes.append(ClusterNode(address, gpus, cpus, int(memory), gpu_name, node_id, num_reserved))
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Plan of a run on the nodes of a joined Ray cluster."""

    plan: Plan
    decisions: tuple[Decision, ...] = ()  # determined by the nodes' resources
    warnings: tuple[str, ...] = ()


def plan_on_nodes(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode], *, is_driver: bool = True) -> ClusterPlan:
    """Check that ``plan`` fits the GPUs, CPUs and memory of its ``nodes``; return it with ``rollout.dcp=auto`` decided.

    With ``is_driver=False``, this process is not the driver of the run, and its environment variables are not checked.
    Raises ``ConfigError`` if the plan does not fit, or if ``placement.device=auto`` selected cpu and the cluster has GPUs.
    """
    cluster = f"the Ray cluster at placement.ray_address={cfg.placement.ray_address!r}"
    gpus = sum(node.num_gpus for node in nodes)
    if plan.device == "cpu" and gpus and cfg.placement.device == "auto":
        raise ConfigError(
            f"placement.device=auto selected cpu, because this machine has no GPU, but {cluster} has {gpus} GPUs: "
            "set placement.device=cuda or placement.device=cpu"
        )
    if plan.device == "cuda":
        _check_gpus(plan, nodes, cluster)
    machine = replace(_machine(plan, nodes), is_joined=is_driver)
    model, extra = model_config(cfg, machine), role_bytes(plan.critic, plan.teacher, PROCESS_BYTES)
    check_fits(cfg, machine, model, plan.roles, plan.engines, device=plan.device, role_bytes=extra)
    shapes = role_shapes(cfg, plan.critic, plan.teacher)
    if plan.device == "cpu":  # check_fits compares the memory of all nodes, but an engine runs on one
        machine = replace(machine, memory_bytes=min((node.memory_bytes for node in nodes), default=0))
    cluster_plan = _with_dcp(cfg, plan, machine, model, shapes)
    if plan.device == "cpu":
        return cluster_plan
    role_specs, engines = (plan.critic, plan.teacher), cluster_plan.plan.engines
    memory = plan_memory(cfg, machine, shapes, plan.actor, engines, plan.roles, role_specs)
    warning = (
        f"the memory of the GPUs of {cluster} is not checked: {memory.unknown}" if memory.unknown else memory.warning
    )
    return replace(cluster_plan, warnings=(warning,) if warning else ())


def _with_dcp(
    cfg: TrainConfig, plan: Plan, machine: Machine, model: HfConfig | None, shapes: RoleShapes
) -> ClusterPlan:
    """Return the plan with ``rollout.dcp=auto`` decided for ``machine``."""
    if cfg.rollout.dcp != AUTO or not plan.engines:
        return ClusterPlan(plan)
    decisions = PlanDecisions([])
    engine = replace(plan.engines[0], dcp=1)
    dcp = plan_dcp(cfg, machine, model, shapes, engine, plan.load, decisions)
    decided = tuple(decisions.entries)
    add_admission_decision(cfg.rollout, dcp.size, None, decisions)
    engines = tuple(dcp.applied_to(engine, cfg) for engine in plan.engines)
    return ClusterPlan(replace(plan, dcp=dcp, engines=engines), decided)


def _check_gpus(plan: Plan, nodes: Sequence[ClusterNode], cluster: str) -> None:
    """Raise ``ConfigError`` if the nodes have enough GPUs but too few CPUs for the plan: Ray reserves a CPU with each GPU."""
    pairs = sum(min(node.num_gpus, node.num_cpus) for node in nodes)
    if pairs < plan.num_gpus <= sum(node.num_gpus for node in nodes):
        raise ConfigError(
            f"the plan needs {plan.num_gpus} GPUs with a CPU each, but the nodes of {cluster} report CPUs for {pairs} of "
            "them: start the nodes with more CPUs (`ray start --num-cpus`)"
        )


def _machine(plan: Plan, nodes: Sequence[ClusterNode]) -> Machine:
    """Return a machine with the smallest number of nodes that have enough GPUs for the plan: those with the most GPUs.

    Its cores and memory per node are the minima over all nodes with GPUs, and its GPU names are those of all these nodes. If the
    plan uses CPUs, the machine has the fewest cores of any node and the memory of all nodes together.
    """
    if plan.device == "cpu":
        cpus, memory = min((node.num_cpus for node in nodes), default=0), sum(node.memory_bytes for node in nodes)
        return Machine(0, cpus, memory, (), is_local=False)
    gpu_nodes = sorted((node for node in nodes if node.num_gpus), key=lambda node: -node.num_gpus)
    num_gpus, num_nodes = 0, 0
    while num_nodes < len(gpu_nodes) and num_gpus < plan.num_gpus:
        num_gpus, num_nodes = num_gpus + gpu_nodes[num_nodes].num_gpus, num_nodes + 1
    return Machine(
        num_gpus=num_gpus,
        cpu_count=min((node.num_cpus for node in gpu_nodes), default=0),
        memory_bytes=min((node.memory_bytes for node in gpu_nodes), default=0),
        gpu_names=tuple(node.gpu_name for node in gpu_nodes),
        is_local=False,
        nodes=max(1, num_nodes),
    )


def _gpu_name(name: str) -> str:
    """Return the planner's name of the GPU that Ray calls ``name``, for example ``H100`` or ``GeForce-RTX-4090``.

    If the planner does not know the GPU, return ``name``.
    """
    gpu = known_gpu(name) or known_gpu(name.replace("-", " "))
    return name if gpu is None else gpu.name
