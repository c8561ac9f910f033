"""Describe the node that was lost together with an actor, for an error message."""

from __future__ import annotations

import re
import time
from typing import Any

import ray
from ray._private import state  # ray.util.state needs the dashboard, which a run does not start
from ray.exceptions import ActorUnavailableError

from slime_like.cluster.supervise import driver_link
from slime_like.util.deadline import Deadline

DECLARED_S = 60.0  # for Ray to declare a lost node dead: five failed checks, by default
CALL_S = 30.0  # for Ray to answer
POLL_S = 0.5


def describe_node(error: Exception) -> str:
    """Return " with its node ADDRESS" if the actor was lost with its node, else an empty string.

    If Ray has already declared the node dead, the text of ``error`` contains its address. If the connection was reset before
    that, ``error`` only says that the actor is unavailable: in a cluster of several nodes, wait, at most ``DECLARED_S``, until
    Ray declares the actor or its node dead.
    """
    if isinstance(error, ActorUnavailableError):
        return _wait_for_decision(error)
    address = re.search(r"^\s*ip: (\S+)$", str(error), re.MULTILINE)
    return f" with its node {address[1]}" if address and "its node has died" in str(error) else ""


def _wait_for_decision(error: ActorUnavailableError) -> str:
    assert hasattr(state, "actors"), "ray moved state.actors: find its new name"
    deadline = Deadline("driver", "post mortem", DECLARED_S)
    with driver_link.bounded_call(
        Deadline("driver", "post mortem", DECLARED_S + CALL_S), "Ray to list actors and nodes"
    ):
        nodes: list[dict[str, Any]] = ray.nodes()
        while len(nodes) > 1 and deadline.elapsed() < deadline.limit:
            actor: dict[str, Any] = state.actors(error.actor_id)
            node = next((node for node in nodes if actor and node["NodeID"] == actor["Address"]["NodeID"]), None)
            if node is None:
                return ""
            if not node["Alive"]:
                return f" with its node {node['NodeManagerAddress']}"
            if actor["State"] == "DEAD":
                return ""
            time.sleep(POLL_S)
            nodes = ray.nodes()
    return ""
