"""Transport of weights from the trainer's ranks to the engines."""

from __future__ import annotations

import os

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.schema.names import COLOCATED_TRANSPORTS, SPLIT_TRANSPORTS
from slime_like.config.schema.resolved import TransportSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.cuda_ipc import expandable_segments, expandable_segments_message

IPC = "ipc"


def plan_transport(cfg: TrainConfig, machine: Machine, device: str, decisions: PlanDecisions) -> TransportSpec:
    """Resolve ``weights.transport``. Raises ``ConfigError`` if the device or the allocator has no CUDA IPC, which it needs."""
    kind = cfg.weights.transport
    setting = expandable_segments(os.environ) if machine.is_local else ""
    if kind == "auto":
        kind, reason = _default(cfg, device, setting)
        decisions.add("weights.transport", kind, reason)
    elif kind == IPC and device == "cpu":
        raise ConfigError(
            f"weights.transport=ipc with placement.device={cfg.placement.device}, which is the CPU here: only GPUs have CUDA IPC; set "
            "weights.transport=auto or tensor"
        )
    elif kind == IPC and setting:
        raise ConfigError(expandable_segments_message(setting))
    backend = "nccl" if device == "cuda" else "gloo"
    max_bytes = int(cfg.weights.bucket_mb * 2**20)
    return TransportSpec(kind, backend, max_bytes, cfg.weights.push_deadline_s, cfg.health.timeout_s)


def _default(cfg: TrainConfig, device: str, setting: str) -> tuple[str, str]:
    """Return the transport of ``auto`` and the reason."""
    mode = cfg.placement.mode
    if mode == "split":
        return next(iter(SPLIT_TRANSPORTS)), "placement.mode is split"
    if device == "cuda" and not setting:
        return IPC, "placement.mode is colocated, on GPUs"
    reason = f"on GPUs with {setting}, which CUDA IPC cannot share" if setting and device == "cuda" else "on a CPU"
    return next(iter(COLOCATED_TRANSPORTS)), f"placement.mode is colocated, {reason}"
