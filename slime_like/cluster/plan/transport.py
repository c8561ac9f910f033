"""Plan of the weight transport: resolve ``weights.transport``, and refuse CUDA IPC where it cannot work."""

from __future__ import annotations

from dataclasses import replace

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.schema.names import SPLIT_TRANSPORTS
from slime_like.config.schema.resolved import TransportSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.cuda_ipc import unshareable_memory, unshareable_memory_message

IPC, HOST = "ipc", "tensor"  # colocated: through GPU memory, through host memory


def plan_transport(
    cfg: TrainConfig, machine: Machine, device: str, engine_num_nodes: int, decisions: PlanDecisions
) -> TransportSpec:
    """Return the transport spec, with ``weights.transport`` resolved.

    Raises ``ConfigError`` if the key is set to ``ipc`` but the device, the allocator's settings or engines on several nodes
    rule out CUDA IPC.
    """
    kind = cfg.weights.transport
    setting = unshareable_memory(machine.environment)
    if kind == "auto":
        kind, reason = _default(cfg, device, setting, engine_num_nodes)
        decisions.add("weights.transport", kind, reason)
    elif kind == IPC and device == "cpu":
        raise ConfigError(
            f"weights.transport=ipc with placement.device={cfg.placement.device}, which is the CPU here: only GPUs have CUDA IPC; set "
            "weights.transport=auto or tensor"
        )
    elif kind == IPC and setting:
        raise ConfigError(unshareable_memory_message(setting))
    elif kind == IPC:
        _refuse_several_nodes(engine_num_nodes)
    backend = "nccl" if device == "cuda" else "gloo"
    max_bytes = int(cfg.weights.bucket_mb * 2**20)
    return TransportSpec(kind, backend, max_bytes, cfg.weights.push_deadline_s, cfg.health.timeout_s)


def transport_on_nodes(cfg: TrainConfig, transport: TransportSpec, engine_num_nodes: int) -> TransportSpec:
    """Return ``transport`` adapted to engines on ``engine_num_nodes`` nodes each.

    Raises ``ConfigError`` if ``weights.transport`` is set to ``ipc`` and the engines are on several nodes.
    """
    if transport.kind != IPC or engine_num_nodes == 1:
        return transport
    if cfg.weights.transport != "auto":
        _refuse_several_nodes(engine_num_nodes)
    return replace(transport, kind=HOST)


def _refuse_several_nodes(engine_num_nodes: int) -> None:
    if engine_num_nodes > 1:
        raise ConfigError(
            f"weights.transport=ipc with engines on {engine_num_nodes} nodes each: CUDA IPC works between processes of one node only; "
            "set weights.transport=auto or tensor, or lower rollout.tp to the GPUs of a node"
        )


def _default(cfg: TrainConfig, device: str, setting: str, engine_num_nodes: int) -> tuple[str, str]:
    """Return the transport that ``auto`` selects, and the reason."""
    mode = cfg.placement.mode
    if mode == "split":
        return next(iter(SPLIT_TRANSPORTS)), "placement.mode is split"
    if engine_num_nodes > 1:
        return HOST, "placement.mode is colocated, with engines on several nodes"
    if device == "cuda" and not setting:
        return IPC, "placement.mode is colocated, on GPUs"
    reason = f"on GPUs with {setting}, which CUDA IPC cannot share" if setting and device == "cuda" else "on a CPU"
    return HOST, f"placement.mode is colocated, {reason}"
