"""Nodes of an engine whose ranks are on several nodes. Each has a server process; the first one's answers requests."""

from __future__ import annotations

from dataclasses import dataclass

RENDEZVOUS_SCHEME = "slime-like-store"  # distributed.rendezvous.SCHEME, without importing torch
DATA_PARALLEL_PORTS = (*range(1, 7), 13)
"""Offsets from the rendezvous port of the ports that data-parallel attention listens at: six of its processes, and one
(DP_ATTENTION_HANDSHAKE_PORT_DELTA of sglang.srt.server_args) at which other nodes ask for the ports of the groups."""


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One node of an engine: SGLang's ``node_rank``, and the addresses by which its processes find those of other nodes."""

    rank: int = 0
    hosts: tuple[str, ...] = ()  # address of each node; empty for an engine on one node
    rendezvous: str = ""  # host:port on the first node, where ``EngineServer.start`` chooses it


SINGLE_NODE = EngineNode()
