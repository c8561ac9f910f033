"""Request the nodes that a run lacks: Ray's autoscaler adds nodes for placement groups that cannot be placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from slime_like.cluster.plan.assignment import node_blocks
from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.config.schema.root import TrainConfig

# Seconds to wait for Ray to say whether a group is placed. Ray takes whole seconds; with 0, its call ends before the answer.
PLACED_S = 1


def request_bundles(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> list[dict[str, float]]:
    """Return one bundle for each set of GPUs that have to be on one node.

    Such a set contains the GPUs of a trainer node, of an engine or its part on a node, or of a tensor parallel group of
    another role. On CPUs, return as many bundles as the minimum number of nodes that the run needs.
    """
    if plan.device == "cpu":
        num_nodes = cfg.placement.actor_num_nodes if plan.needs_trainer else 1
        return [{"CPU": 1.0}] * max([num_nodes, *(engine.num_nodes for engine in plan.engines)])
    sizes = [len(block.indices) for block in node_blocks(cfg, plan, _nodes_per_engine(cfg, plan, nodes))]
    return [{"GPU": float(size), "CPU": float(size)} for size in sizes]


def _nodes_per_engine(cfg: TrainConfig, plan: Plan, nodes: Sequence[ClusterNode]) -> int:
    """Return the smallest number of nodes per engine at which each part of an engine fits on the largest known node.

    A part that is larger than every node could never be placed. Nodes are assumed to have at least as many GPUs as
    there are trainer ranks on a node, or one GPU in a run without a trainer. ``rollout.engine_num_nodes`` takes
    precedence.
    """
    tp = cfg.rollout.tp
    if cfg.rollout.engine_num_nodes:
        return cfg.rollout.engine_num_nodes
    ranks = plan.actor.layout.world_size // cfg.placement.actor_num_nodes if plan.needs_trainer else 1
    max_gpus = max([ranks, *(node.num_gpus for node in nodes)])
    return next(count for count in range(1, tp + 1) if tp % count == 0 and tp // count <= max_gpus)


def request_strategy(plan: Plan) -> str:
    """Return Ray's placement strategy for the bundles: on different nodes, or packed if several may share a node.

    Bundles for CPUs need different nodes. So do the bundles of a run that uses only the trainer's GPUs, because ``assign``
    never puts two trainer nodes on one node.
    """
    only_trainers = plan.needs_trainer and plan.num_gpus == plan.actor.layout.world_size
    return "STRICT_SPREAD" if plan.device == "cpu" or only_trainers else "PACK"


class NodeRequest:
    """Pending placement group with the bundles of a run. It reserves nothing while the cluster lacks nodes.

    Ray removes it when the driver ends.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._group: Any = None

    def renew(self, bundles: list[dict[str, float]]) -> None:
        """Create the placement group if there is none. Otherwise, if Ray places it within ``PLACED_S``, remove it.

        A placed group reserves resources that the run itself needs. Call this repeatedly while nodes are missing.
        """
        if self._group is None:
            self._group = placement_group(bundles, strategy=self._strategy)
        elif self._group.wait(PLACED_S):
            self.withdraw()

    def withdraw(self) -> None:
        """Remove the placement group, if there is one. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
