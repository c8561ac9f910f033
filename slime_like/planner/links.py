"""Time of collectives between GPUs."""

from __future__ import annotations

from slime_like.hardware import Hardware
from slime_like.planner import constants


def all_reduce_seconds(hardware: Hardware, gpus: int, num_bytes: float) -> float:
    """Return the seconds of an all-reduce of ``num_bytes`` over ``gpus`` GPUs, without the fixed time of its kernel."""
    if gpus == 1:
        return 0.0
    nodes, inside = _nodes(hardware, gpus)
    share = constants.LINK_SHARE.value
    seconds = 2 * (inside - 1) / inside * num_bytes / (hardware.gpu.link * share)
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * num_bytes / (inside * hardware.gpu.network * share)
        seconds += constants.NODE_HOP_SECONDS.value
    return seconds


def all_gather_seconds(hardware: Hardware, gpus: int, num_bytes: float) -> float:
    """Return the seconds of an all-gather over a ring of ``gpus`` GPUs, without the fixed time of its kernel.

    ``num_bytes`` is the size of all shards together. A GPU receives the other shards over its links, and a node receives the
    shards of other nodes over its network.
    """
    nodes, inside = _nodes(hardware, gpus)
    links = num_bytes * (gpus - 1) / gpus / hardware.gpu.link
    network = num_bytes * (nodes - 1) / nodes / (inside * hardware.gpu.network)
    return max(links, network) / constants.LINK_SHARE.value


def _nodes(hardware: Hardware, gpus: int) -> tuple[int, int]:
    """Return the number of nodes that ``gpus`` GPUs span, and the largest number of these GPUs in one node."""
    return -(-gpus // hardware.gpus), min(gpus, hardware.gpus)
