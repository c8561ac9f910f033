"""Schedule actors on a given node."""

from __future__ import annotations

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy for an actor that may run only on the node with Ray's id ``node_id``."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
