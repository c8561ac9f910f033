"""Rules for engines on several nodes. ``rollout.engine_num_nodes`` or the plan sets the number of nodes of an engine."""

from __future__ import annotations

from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

KEY = "rollout.engine_num_nodes"


def check_engine_nodes(cfg: TrainConfig, num_nodes: int) -> None:
    """Raise ``ConfigError`` if engines that span ``num_nodes`` nodes conflict with other keys."""
    rollout = cfg.rollout
    if num_nodes == 1:
        return
    if rollout.engine_num_nodes:
        subject, fix = f"{KEY}={num_nodes}", f"{KEY}=null (with rollout.tp of at most the GPUs of a node)"
    else:
        subject = f"rollout.tp={rollout.tp}, which needs engines of {num_nodes} nodes"
        fix = "rollout.tp to at most the number of GPUs of a node"
    if rollout.tp % num_nodes:
        raise ConfigError(
            f"{subject} with rollout.tp={rollout.tp}: every node of an engine has the same number of ranks; set {KEY} to a "
            "divisor of rollout.tp"
        )
    if cfg.placement.ray_address is None:
        raise ConfigError(
            f"{subject}, without a running Ray cluster: set placement.ray_address=auto or its address, or set {fix}"
        )
    if rollout.flow_mla.enabled and rollout.flow_mla.transport == "p2p":
        raise ConfigError(
            f"{subject} with rollout.flow_mla.transport=p2p: a rank cannot read the memory of another node; set "
            "rollout.flow_mla.transport=collective"
        )
    if rollout.symmetric_memory:
        raise ConfigError(
            f"{subject} with rollout.symmetric_memory=true: NCCL's symmetric memory connects the GPUs of one node; set "
            "rollout.symmetric_memory=false"
        )
    if rollout.remote_experts.enabled:
        raise ConfigError(
            f"{subject} with rollout.remote_experts: workers of engines on several nodes have not been tested; set "
            "rollout.remote_experts.count=0 and rollout.remote_experts.experts=[]"
        )
