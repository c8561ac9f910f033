"""Assignment of a run's processes to the nodes of a joined Ray cluster.

Trainer ranks fill ``placement.actor_num_nodes`` nodes in order of address, with the same number of ranks on each. Each engine
is split into equal parts on ``rollout.engine_num_nodes`` nodes. If that key is not set, each engine is on one node if all of
them fit that way, otherwise on as few nodes as possible, the same number for every engine.

Engines that share the trainer's GPUs are on the nodes of those GPUs. Each other engine takes the node with the fewest free GPUs
that suffice or, if it is split, the nodes with the most free GPUs. On CPUs, engines are assigned round-robin: colocated engines
to the trainer's nodes, others to the nodes without ranks. If these are too few for an engine, all nodes are used. If another
role has its own GPUs, each of its tensor parallel groups is on one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import groupby

from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.cluster.plan.types import Role
from slime_like.config.rules.engine_nodes import KEY, check_engine_nodes
from slime_like.config.rules.float8_engines import check_float8_gpus
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, MissingResources
from slime_like.util.counted import counted

TRAINER, ENGINE = "trainer", "engine"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Nodes of a run's processes; empty in a run on one machine."""

    gpus: tuple[ClusterNode, ...] = ()  # node of each GPU of the run, by run-local index
    processes: Mapping[str, tuple[ClusterNode, ...]] | None = None  # on a CPU: node of each process, by role
    nodes_per_engine: int = 1  # if more than 1, ``processes`` contains the nodes of engine 0, then of engine 1, ...

    def used(self, nodes: Sequence[ClusterNode]) -> tuple[ClusterNode, ...]:
        """Return the nodes of the run's GPUs, or all ``nodes`` of the cluster if the run uses no GPUs."""
        return tuple(dict.fromkeys(self.gpus)) or tuple(nodes)

    @property
    def summary(self) -> str:
        """One line with the number of GPUs on each node or, on CPUs, the number of processes by role and node.

        It is empty in a run on one machine.
        """
        if self.processes is None:
            counts = Counter(node.address for node in self.gpus)
            return ", ".join(f"{number} GPUs on {address}" for address, number in counts.items())
        parts: list[str] = []
        for role, nodes in self.processes.items():
            name = "engine part" if role == ENGINE and self.nodes_per_engine > 1 else role
            counts = Counter(node.address for node in nodes)
            parts += [f"{counted(number, name)} on {address}" for address, number in counts.items()]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """GPUs of the run that have to be on one node."""

    role: str
    indices: tuple[int, ...]
    engine: int = -1  # first GPU of the engine that this block is a part of; -1 for a whole engine or another role


def assign(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> Assignment:
    """Return the node of each process of a run on CPUs, or of each GPU of a run on GPUs.

    Raises ``MissingResources`` if the cluster lacks nodes or GPUs, and ``ConfigError`` if engines cannot be split into
    equal parts, do not support the kind of GPU, or would be on a number of nodes that ``rollout.engine_num_nodes`` or other
    keys rule out.
    """
    ordered = sorted(nodes, key=_order)
    if plan.device == "cpu":
        num_nodes = plan.engines[0].num_nodes if plan.engines else 1
        return Assignment(processes=_on_cpu(cfg, plan, ordered, num_nodes), nodes_per_engine=num_nodes)
    gpus = _on_gpus(cfg, plan, ordered)
    check_float8_gpus(cfg, {node.gpu_name for node in gpus})
    return Assignment(gpus=gpus, nodes_per_engine=_nodes_per_engine(cfg, plan, gpus))


def _order(node: ClusterNode) -> tuple[int, str]:
    try:
        return int(ip_address(node.address)), node.address
    except ValueError:  # a host name
        return 0, node.address


def _on_cpu(
    cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode], nodes_per_engine: int
) -> dict[str, tuple[ClusterNode, ...]]:
    usable = [node for node in nodes if node.num_cpus]
    num_required = cfg.placement.actor_num_nodes if plan.needs_trainer else 1
    if len(usable) < num_required:
        raise MissingResources(
            f"placement.actor_num_nodes={num_required}, but the Ray cluster has {counted(len(usable), 'node')} with CPUs{_describe_free_gpus(nodes)}: add "
            f"nodes, or lower placement.actor_num_nodes"
        )
    if len(usable) < nodes_per_engine:
        raise MissingResources(
            f"{KEY}={nodes_per_engine}, but the Ray cluster has {counted(len(usable), 'node')} with CPUs: add nodes, or lower {KEY}"
        )
    trainers = usable[:num_required] if plan.needs_trainer else usable
    engine_nodes = trainers if plan.colocated else usable[num_required:] or trainers
    if len(engine_nodes) < nodes_per_engine:
        engine_nodes = usable
    return {
        role.name: tuple(engine_nodes[i % len(engine_nodes)] for i in range(len(role.devices) * nodes_per_engine))
        if role.name == ENGINE
        else tuple(trainers[i * len(trainers) // len(role.devices)] for i in range(len(role.devices)))
        for role in plan.roles
    }


def _on_gpus(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> tuple[ClusterNode, ...]:
    """Return the node of each GPU of the run.

    Engines that share the trainer's GPUs are on the nodes of those GPUs. Each engine with GPUs of its own is on
    ``rollout.engine_num_nodes`` nodes or, if that is not set, on as few as possible, the same number for every engine.
    Raises ``MissingResources`` if the nodes lack free GPUs for the run.
    """
    tp, num_nodes = cfg.rollout.tp, cfg.rollout.engine_num_nodes
    num_free = sum(node.free_gpus for node in nodes)
    if num_free < plan.num_gpus:
        roles = ", ".join(f"{role.name}s {sum(map(len, role.devices))}" for role in plan.roles)
        raise MissingResources(
            f"the run needs {plan.num_gpus} GPUs ({roles}; placement.mode={cfg.placement.mode}), but the nodes have "
            f"{num_free}{_describe_free_gpus(nodes)}: add nodes, lower parallel.*, placement.actor_num_nodes, "
            "placement.actor_num_gpus_per_node or rollout.num_engines"
        )
    sizes = [num_nodes] if num_nodes else [n for n in range(1, min(tp, len(nodes)) + 1) if tp % n == 0]
    errors: list[MissingResources] = []
    for size in sizes:
        try:
            return _with_engine_parts(cfg, plan, nodes, size)
        except MissingResources as error:
            errors.append(error)
    raise errors[0]


def _with_engine_parts(
    cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode], nodes_per_engine: int
) -> tuple[ClusterNode, ...]:
    """Return the node of each GPU.

    Each engine that does not share the trainer's GPUs is on ``nodes_per_engine`` nodes. The blocks of the trainer are on
    different nodes, and so are the parts of an engine. Raises ``MissingResources`` if no node with enough free GPUs is left
    for a block.
    """
    free = {node.node_id: node.free_gpus for node in nodes}
    node_of_gpu: dict[int, ClusterNode] = {}
    used_nodes: dict[tuple[str, int], set[str]] = {}  # nodes that already have a block, by (role, engine)
    for block in sorted(
        node_blocks(cfg, plan, nodes_per_engine), key=lambda block: (block.role != TRAINER, -len(block.indices))
    ):
        fitting = [node for node in nodes if free[node.node_id] >= len(block.indices)]
        excluded = used_nodes.setdefault((block.role, block.engine), set())
        if block.role == TRAINER or block.engine >= 0:
            fitting = [node for node in fitting if node.node_id not in excluded]
        if block.role != TRAINER:
            # Parts take the nodes with the most free GPUs, so that the parts of later engines fit on different nodes.
            fitting.sort(key=lambda node: free[node.node_id] * (-1 if block.engine >= 0 else 1))
        if not fitting:
            raise MissingResources(_no_node(cfg, block, nodes, nodes_per_engine, max(free.values(), default=0)))
        excluded.add(fitting[0].node_id)
        free[fitting[0].node_id] -= len(block.indices)
        node_of_gpu |= dict.fromkeys(block.indices, fitting[0])
    return tuple(node_of_gpu[index] for index in range(plan.num_gpus))


def _nodes_per_engine(cfg: TrainConfig, plan: Plan, gpus: Sequence[ClusterNode]) -> int:
    """Return the number of nodes of each engine, the same for all engines.

    Raises ``ConfigError`` if engines would have unequal parts, if ``rollout.engine_num_nodes`` is set but engines that share
    the trainer's GPUs are on a different number of nodes, or if other keys rule out engines on several nodes.
    """
    engines = [devices for role in plan.roles if role.name == ENGINE for devices in role.devices]
    parts = [[len(list(part)) for _, part in groupby(gpus[i].node_id for i in devices)] for devices in engines]
    if not parts:
        return 1
    num_nodes = len(parts[0])
    if any(len(set(part)) > 1 or len(part) != num_nodes for part in parts):
        uneven = next(part for part in parts if len(set(part)) > 1 or len(part) != num_nodes)
        raise ConfigError(
            f"rollout.tp={cfg.rollout.tp}: an engine would have {' + '.join(map(str, uneven))} GPUs on {len(uneven)} nodes, and the first "
            f"engine {' + '.join(map(str, parts[0]))}; every engine needs equal parts: set rollout.tp to a divisor or a multiple of "
            "placement.actor_num_gpus_per_node"
        )
    if num_nodes != (cfg.rollout.engine_num_nodes or num_nodes):
        raise ConfigError(
            f"{KEY}={cfg.rollout.engine_num_nodes}, but with placement.mode=colocated an engine of rollout.tp={cfg.rollout.tp} shares "
            f"GPUs of the trainer on {num_nodes} nodes: remove {KEY}, or set placement.mode=split"
        )
    check_engine_nodes(cfg, num_nodes)
    return num_nodes


def node_blocks(cfg: TrainConfig, plan: Plan, nodes_per_engine: int) -> Iterator[NodeBlock]:
    """Yield disjoint blocks that cover all GPUs of the run; a role on the GPUs of an earlier role adds none."""
    covered: set[int] = set()
    for role in plan.roles:
        for indices in _groups_of_role(cfg, role):
            if new_indices := tuple(index for index in indices if index not in covered):
                if role.name == ENGINE:
                    yield from _parts(role.name, new_indices, nodes_per_engine)
                else:
                    yield NodeBlock(role.name, new_indices)
            covered.update(indices)


def _parts(role: str, indices: tuple[int, ...], num_nodes: int) -> Iterator[NodeBlock]:
    """Yield one block of an engine's GPUs for each of its ``num_nodes`` nodes."""
    size = -(-len(indices) // num_nodes)
    for begin in range(0, len(indices), size):
        yield NodeBlock(role, indices[begin : begin + size], indices[0] if num_nodes > 1 else -1)


def _groups_of_role(cfg: TrainConfig, role: Role) -> list[tuple[int, ...]]:
    """Return the GPUs of ``role`` in groups: one group per engine or, for the trainer, per node.

    Any other role has one group per tensor parallel group. Each group has to be on one node, except that an engine may be
    split into parts.
    """
    if role.name == ENGINE:
        return list(role.devices)
    indices = tuple(index for devices in role.devices for index in devices)
    size = (
        len(indices) // cfg.placement.actor_num_nodes if role.name == TRAINER else role.layout.tp if role.layout else 1
    )
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _no_node(
    cfg: TrainConfig, block: NodeBlock, nodes: Sequence[ClusterNode], nodes_per_engine: int, max_free: int
) -> str:
    """Return the error message for a block that fits on no node.

    ``max_free`` is the largest number of GPUs that are still free on a node after the blocks assigned so far.
    """
    size = len(block.indices)
    if block.role == TRAINER:
        num_nodes = cfg.placement.actor_num_nodes
        num_gpus = size * num_nodes
        num_fitting = next(
            (n for n in range(num_nodes, num_gpus + 1) if num_gpus % n == 0 and _have(nodes, n, num_gpus // n)), None
        )
        fix = (
            f"set placement.actor_num_nodes={num_fitting} placement.actor_num_gpus_per_node={num_gpus // num_fitting}"
            if num_fitting
            else "lower placement.actor_num_nodes or placement.actor_num_gpus_per_node"
        )
        return (
            f"placement.actor_num_nodes={num_nodes} with {counted(size, 'trainer rank')} on each needs {counted(num_nodes, 'node')} with "
            f"{counted(size, 'free GPU')}, which the Ray cluster does not have{_describe_free_gpus(nodes)}: add nodes, or {fix}"
        )
    if block.role == ENGINE:
        placement = (
            f"each on {nodes_per_engine} nodes"
            if cfg.rollout.engine_num_nodes
            else "each on one node or in equal parts on several nodes"
        )
        return (
            f"rollout.tp={cfg.rollout.tp}: the Ray cluster has too few free GPUs for rollout.num_engines={cfg.rollout.num_engines} "
            f"engines, {placement}{_describe_free_gpus(nodes)}: add nodes, or lower rollout.tp or rollout.num_engines"
        )
    return (
        f"{block.role}.tp={size}: a tensor parallel group of the {block.role} runs on one node, and with the other processes "
        f"no node of the Ray cluster has more than {counted(max_free, 'free GPU')}{_describe_free_gpus(nodes)}: add nodes, "
        + (f"or lower {block.role}.tp to {max_free} or less" if max_free else "or wait until GPUs are free")
    )


def _have(nodes: Sequence[ClusterNode], num_nodes: int, num_gpus: int) -> bool:
    return sum(node.free_gpus >= num_gpus for node in nodes) >= num_nodes


def _describe_free_gpus(nodes: Sequence[ClusterNode]) -> str:
    parts = [
        f"{node.address}: {node.free_gpus} of {node.num_gpus} GPUs free" if node.num_gpus else f"{node.address}: no GPU"
        for node in nodes
    ]
    return f" ({', '.join(parts)})" if parts else ""
