"""Request for the nodes that a run lacks. Ray's autoscaler adds nodes for placement groups that it cannot place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from slime_like.cluster.plan.planner import Plan
from slime_like.config.schema.root import TrainConfig

# Seconds for the answer to the question if a group is placed. Ray takes whole ones; with 0, its call ends before the answer.
PLACED_S = 1


def request_bundles(cfg: TrainConfig, plan: Plan) -> list[dict[str, float]]:
    """Return the resources of each trainer node, and one bundle for each other GPU; on CPUs one for each trainer node."""
    num_nodes = cfg.placement.actor_num_nodes if plan.needs_trainer else 1
    if plan.device == "cpu":
        return [{"CPU": 1.0}] * num_nodes
    per_node = plan.actor.layout.world_size // num_nodes if plan.needs_trainer else 0
    rest = plan.num_gpus - num_nodes * per_node
    trainers = [{"GPU": float(per_node), "CPU": float(per_node)}] * num_nodes if per_node else []
    return [*trainers, *[{"GPU": 1.0, "CPU": 1.0}] * rest]


def request_strategy(plan: Plan) -> str:
    """Return Ray's strategy for the bundles: each on another node if all are trainer nodes, which ``assign`` never puts on one."""
    only_trainers = plan.needs_trainer and plan.num_gpus == plan.actor.layout.world_size
    return "STRICT_SPREAD" if plan.device == "cpu" or only_trainers else "PACK"


class NodeRequest:
    """Pending placement group of a run's size. It reserves nothing while the cluster lacks nodes; Ray removes it with the driver."""

    def __init__(self, bundles: Sequence[dict[str, float]], strategy: str) -> None:
        self._bundles, self._strategy = list(bundles), strategy
        self._group: Any = None

    def renew(self) -> None:
        """Create the group unless it is pending. Remove it once it has reserved its resources, which the run itself needs."""
        if self._group is None:
            self._group = placement_group(self._bundles, strategy=self._strategy)
        elif self._group.wait(PLACED_S):
            self.withdraw()

    def withdraw(self) -> None:
        """Remove the group. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
