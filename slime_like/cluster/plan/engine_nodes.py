"""Choose the number of nodes of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.rules.engine_nodes import KEY, check_engine_nodes
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.counted import counted


def engine_nodes(cfg: TrainConfig, machine: Machine, device: str, decisions: PlanDecisions) -> int:
    """Return the number of nodes of each engine on ``machine``.

    On this machine or on CPUs, it is ``rollout.engine_num_nodes``, or 1 if that is not set; if the run joins a Ray cluster with
    GPUs, ``assign`` replaces it later. Raises ``ConfigError`` if the nodes of a described machine lack GPUs for equal parts of
    an engine, or if other keys rule out engines on several nodes.
    """
    tp, num_nodes, per_node = cfg.rollout.tp, cfg.rollout.engine_num_nodes, machine.num_gpus // machine.nodes
    if device != "cuda" or machine.is_local:
        return num_nodes or 1
    if num_nodes is None:
        num_nodes = max(1, tp // max(1, per_node))
        if num_nodes > 1:
            decisions.add(KEY, num_nodes, f"rollout.tp={tp} and {per_node} GPUs on each node")
    if machine.nodes > 1 and (num_nodes > machine.nodes or tp > num_nodes * per_node or tp % num_nodes):
        fix = (
            f"{KEY}=null"
            if cfg.rollout.engine_num_nodes
            else f"rollout.tp={per_node} or a multiple of it, at most {machine.num_gpus}"
        )
        raise ConfigError(
            f"rollout.tp={tp} on {counted(num_nodes, 'node')}: each node of an engine needs the same number of GPUs, and the {machine.nodes} "
            f"nodes of --plan-for have {per_node}: set {fix}"
        )
    if machine.nodes > 1:
        check_engine_nodes(cfg, num_nodes)
    return num_nodes if machine.nodes > 1 else 1


def on_nodes(engines: Sequence[EngineSpec], num_nodes: int) -> tuple[EngineSpec, ...]:
    """Return ``engines`` with ``num_nodes`` nodes each."""
    return tuple(replace(engine, num_nodes=num_nodes) for engine in engines)
