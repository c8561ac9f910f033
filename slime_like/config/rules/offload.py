"""Rules for ``placement.offload_*``, which release device memory between the phases of the loop."""

from __future__ import annotations

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

GRAPHS = {
    "cuda_graph_backend_prefill": "disabled, which is the default here, or to full",
    "cuda_graph_backend_decode": "full",
}
"""Fields of SGLang's arguments -> backends whose graphs SGLang can release."""


def check_offload(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if trainer or engines are offloaded but do not take turns on the same devices.

    ``placement.offload_rollout`` also needs engines that can release their memory, and excludes a skipped push, because a
    released engine loses its weights.
    """
    for name in ("offload_train", "offload_rollout"):
        if getattr(cfg.placement, name):
            _check_turns(cfg, f"placement.{name}=true")
    if cfg.placement.offload_rollout:
        _check_engines(cfg, "placement.offload_rollout=true")


def _check_turns(cfg: TrainConfig, setting: str) -> None:
    """Raise ``ConfigError`` unless trainer and engines take turns on the same devices."""
    if cfg.placement.mode != "colocated":
        raise ConfigError(
            f"{setting} with placement.mode={cfg.placement.mode}: trainer and engines have separate devices, so neither needs the "
            f"other's memory; set {setting.partition('=')[0]}=false, or placement.mode=colocated"
        )
    if isinstance(cfg.algo, SftConfig) or cfg.run.mode != "full":
        reason = "algo=sft" if isinstance(cfg.algo, SftConfig) else f"run.mode={cfg.run.mode}"
        raise ConfigError(
            f"{setting} with {reason}: trainer and engines do not take turns in such a run; set {setting.partition('=')[0]}=false"
        )


def _check_engines(cfg: TrainConfig, setting: str) -> None:
    """Raise ``ConfigError`` if engines could not release their memory, or would have no weights after a skipped push."""
    if cfg.weights.debug_skip_push_at is not None:
        raise ConfigError(
            f"{setting} with weights.debug_skip_push_at={cfg.weights.debug_skip_push_at}: the weights of a released engine are lost, "
            "so a push cannot be skipped; remove weights.debug_skip_push_at, or set placement.offload_rollout=false"
        )
    if cfg.health.on_stalled_engine == "wait":
        raise ConfigError(
            f"{setting} with health.on_stalled_engine=wait: an engine that does not respond would keep the memory that the trainer "
            "needs; set health.on_stalled_engine=restart or stop, or remove placement.offload_rollout"
        )
    if cfg.rollout.sglang.get("enable_memory_saver") is False:
        raise ConfigError(
            f"{setting} with rollout.sglang.enable_memory_saver=false: SGLang releases memory only with its memory saver; remove "
            "rollout.sglang.enable_memory_saver"
        )
    for field, backends in GRAPHS.items():
        if cfg.rollout.sglang.get(field) == "breakable":
            raise ConfigError(
                f"{setting} with rollout.sglang.{field}=breakable: SGLang cannot release such graphs; set rollout.sglang.{field} to "
                f"{backends}"
            )
    flow = cfg.rollout.flow_mla
    if flow.enabled and flow.transport == "p2p":
        raise ConfigError(
            f"{setting} with rollout.flow_mla.transport=p2p: memory that other ranks have mapped cannot be released; set "
            "rollout.flow_mla.transport=collective, or remove placement.offload_rollout"
        )
    if cfg.rollout.remote_experts.enabled:
        raise ConfigError(
            f"{setting} with rollout.remote_experts: the memory of a worker cannot be released; set "
            "placement.offload_rollout=false, or remove the keys of rollout.remote_experts"
        )
