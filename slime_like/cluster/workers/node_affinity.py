"""Scheduling of actors on a given node."""

from __future__ import annotations

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy of an actor that runs on this node only."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
