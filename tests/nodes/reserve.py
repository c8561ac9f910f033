"""Reserve CPUs on a node other than the first two: ``python -m tests.nodes.reserve CLUSTER`` prints the node's address."""

from __future__ import annotations

import logging
import sys

import ray
from ray.util.placement_group import placement_group_table

from slime_like.cluster.plan.ray_cluster import cluster_nodes
from slime_like.cluster.workers.engine_starter import spread_group

LIMIT_S = 60


def main(address: str) -> None:
    """Join the cluster; reserve a bundle, and print the address of its node."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    nodes = sorted(cluster_nodes(ray.nodes()), key=lambda node: node.address)
    group = spread_group({"CPU": 1}, 1, [node.node_id for node in nodes[:2]])
    ray.get(group.ready(), timeout=LIMIT_S)
    reserved = placement_group_table(group)["bundles_to_node_id"].values()
    sys.stdout.write("".join(f"{node.address}\n" for node in nodes if node.node_id in reserved))


if __name__ == "__main__":
    main(sys.argv[1])
