"""Nodes of a multi-node engine. Each node has a server process, but only the one on the first node serves requests."""

from __future__ import annotations

from dataclasses import dataclass

RENDEZVOUS_SCHEME = "slime-like-store"  # distributed.rendezvous.SCHEME, without importing torch
DATA_PARALLEL_PORTS = (*range(1, 7), 13)
"""Ports of data-parallel attention, as offsets from the rendezvous port.

Six ports are for its processes. At the other one (DP_ATTENTION_HANDSHAKE_PORT_DELTA of sglang.srt.server_args), other
nodes request the ports of the groups.
"""


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One node of an engine: its rank (SGLang's ``node_rank``), and the addresses at which the engine's nodes connect."""

    rank: int = 0
    hosts: tuple[str, ...] = ()  # address of each node; empty for an engine on one node
    rendezvous: str = ""  # host:port on the first node, where ``EngineServer.start`` chooses it


SINGLE_NODE = EngineNode()
