"""Assignment of a run's processes to the nodes of a joined Ray cluster.

Trainer ranks fill ``placement.actor_num_nodes`` nodes in the order of the nodes' addresses, the same number on each. An engine
is on one node: with ``placement.mode=colocated`` on the trainer's, otherwise on the node with the fewest free GPUs that suffice;
on CPUs, engines take turns on the nodes without ranks. With separate GPUs for another role, each of its tensor parallel groups
is on one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.cluster.plan.types import Role
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import MissingResources

TRAINER, ENGINE = "trainer", "engine"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Nodes of a run's processes; empty in a run on one machine."""

    gpus: tuple[ClusterNode, ...] = ()  # node of each GPU of the run, by run-local index
    processes: Mapping[str, tuple[ClusterNode, ...]] | None = None  # on a CPU: role -> node of each process

    @property
    def summary(self) -> str:
        """Describe the nodes of each role in one line; empty in a run on one machine."""
        if self.processes is None:
            counts = Counter(node.address for node in self.gpus)
            return ", ".join(f"{number} GPUs on {address}" for address, number in counts.items())
        parts: list[str] = []
        for role, nodes in self.processes.items():
            counts = Counter(node.address for node in nodes)
            parts += [f"{number} {role}{'s' * (number > 1)} on {address}" for address, number in counts.items()]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Block:
    """GPUs of the run that have to be on one node."""

    role: str
    indices: tuple[int, ...]


def assign(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> Assignment:
    """Return the node of each process. Raises ``MissingResources`` naming the missing nodes or GPUs."""
    ordered = sorted(nodes, key=_order)
    if plan.device == "cpu":
        return Assignment(processes=_on_cpu(cfg, plan, ordered))
    return Assignment(gpus=_on_gpus(cfg, plan, ordered))


def _order(node: ClusterNode) -> tuple[int, str]:
    try:
        return int(ip_address(node.address)), node.address
    except ValueError:  # a host name
        return 0, node.address


def _on_cpu(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> dict[str, tuple[ClusterNode, ...]]:
    usable = [node for node in nodes if node.num_cpus]
    needed = cfg.placement.actor_num_nodes if plan.needs_trainer else 1
    if len(usable) < needed:
        raise MissingResources(
            f"placement.actor_num_nodes={needed}, but the Ray cluster has {len(usable)} nodes with CPUs{_describe_free_gpus(nodes)}: add "
            f"nodes, or lower placement.actor_num_nodes"
        )
    trainers = usable[:needed] if plan.needs_trainer else usable
    others = trainers if plan.colocated else usable[needed:] or trainers
    return {
        role.name: tuple(
            others[i % len(others)] if role.name == ENGINE else trainers[i * len(trainers) // len(role.devices)]
            for i in range(len(role.devices))
        )
        for role in plan.roles
    }


def _on_gpus(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> tuple[ClusterNode, ...]:
    free = {node.node_id: node.free_gpus for node in nodes}
    if sum(free.values()) < plan.num_gpus:
        roles = ", ".join(f"{role.name}s {sum(map(len, role.devices))}" for role in plan.roles)
        raise MissingResources(
            f"the run needs {plan.num_gpus} GPUs ({roles}; placement.mode={cfg.placement.mode}), but the nodes have "
            f"{sum(free.values())}{_describe_free_gpus(nodes)}: add nodes, lower parallel.*, placement.actor_num_nodes, "
            "placement.actor_num_gpus_per_node or rollout.num_engines"
        )
    node_of_gpu: dict[int, ClusterNode] = {}
    trainer_nodes: set[str] = set()
    for block in sorted(_blocks(cfg, plan), key=lambda block: (block.role != TRAINER, -len(block.indices))):
        fitting = [node for node in nodes if free[node.node_id] >= len(block.indices)]
        if block.role == TRAINER:
            fitting = [node for node in fitting if node.node_id not in trainer_nodes]
        else:
            fitting.sort(key=lambda node: free[node.node_id])
        if not fitting:
            raise MissingResources(_no_node(cfg, block, nodes))
        if block.role == TRAINER:
            trainer_nodes.add(fitting[0].node_id)
        free[fitting[0].node_id] -= len(block.indices)
        node_of_gpu |= dict.fromkeys(block.indices, fitting[0])
    return tuple(node_of_gpu[index] for index in range(plan.num_gpus))


def _blocks(cfg: TrainConfig, plan: Plan) -> Iterator[_Block]:
    """Yield disjoint blocks that cover all GPUs of the run; processes on the GPUs of an earlier role add none."""
    covered: set[int] = set()
    for role in plan.roles:
        for indices in _groups_of_role(cfg, role):
            if rest := tuple(index for index in indices if index not in covered):
                yield _Block(role.name, rest)
            covered.update(indices)


def _groups_of_role(cfg: TrainConfig, role: Role) -> list[tuple[int, ...]]:
    """Return the GPUs of a role that have to be on one node each."""
    if role.name == ENGINE:
        return list(role.devices)
    indices = tuple(index for devices in role.devices for index in devices)
    size = (
        len(indices) // cfg.placement.actor_num_nodes if role.name == TRAINER else role.layout.tp if role.layout else 1
    )
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _no_node(cfg: TrainConfig, block: _Block, nodes: Sequence[ClusterNode]) -> str:
    size, max_free = len(block.indices), max((node.free_gpus for node in nodes), default=0)
    if block.role == TRAINER:
        num_nodes = cfg.placement.actor_num_nodes
        total = size * num_nodes
        fits = next((n for n in range(num_nodes, total + 1) if total % n == 0 and _have(nodes, n, total // n)), None)
        fix = (
            f"placement.actor_num_nodes={fits} placement.actor_num_gpus_per_node={total // fits}"
            if fits
            else "fewer ranks"
        )
        return (
            f"placement.actor_num_nodes={num_nodes} with {size} trainer ranks on each needs {num_nodes} nodes with {size} free "
            f"GPUs, which the Ray cluster does not have{_describe_free_gpus(nodes)}: add nodes, or set {fix}"
        )
    key = f"rollout.tp={size}" if block.role == ENGINE else f"{block.role}.tp={size}"
    return (
        f"{key}: {'an engine' if block.role == ENGINE else f'a tensor parallel group of the {block.role}'} runs on one node, and no "
        f"node of the Ray cluster has {size} free GPUs{_describe_free_gpus(nodes)}: add nodes, or lower it to {max_free} or less"
    )


def _have(nodes: Sequence[ClusterNode], count: int, num_gpus: int) -> bool:
    return sum(node.free_gpus >= num_gpus for node in nodes) >= count


def _describe_free_gpus(nodes: Sequence[ClusterNode]) -> str:
    parts = [
        f"{node.address}: {node.free_gpus} of {node.num_gpus} GPUs free" if node.num_gpus else f"{node.address}: no GPU"
        for node in nodes
    ]
    return f" ({', '.join(parts)})" if parts else ""
