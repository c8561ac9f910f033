"""Rules for ``model.attention=te``. TransformerEngine is located but not imported, because rules must be fast."""

from __future__ import annotations

import importlib.util

from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

FIX = "set model.attention=auto, which uses slime_like's torch attention"
INSTALL = "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'"


def has_transformer_engine() -> bool:
    """Return whether this environment has TransformerEngine."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_attention(cfg: TrainConfig, device: str, dtype: str) -> None:
    """Raise ``ConfigError`` if ``model.attention=te`` conflicts with the device, the dtype or other keys.

    Other values of ``model.attention`` are not checked. ``device`` and ``dtype`` may be auto.
    """
    if cfg.model.attention != "te":
        return
    if device == "cpu":
        raise ConfigError(f"model.attention=te on a CPU: TransformerEngine has kernels for NVIDIA GPUs only; {FIX}")
    if cfg.run.deterministic:
        raise ConfigError(
            f"model.attention=te with run.deterministic=true: TransformerEngine picks kernels by shape and machine; {FIX}, "
            "or run.deterministic=false"
        )
    if dtype == "float32":
        raise ConfigError(
            "model.attention=te with model.dtype=float32: TransformerEngine's flash and fused kernels support 16-bit dtypes only; "
            f"set model.dtype=bfloat16, or {FIX.removeprefix('set ')}"
        )
    exchange = cfg.model.megatron.get("cp_comm_type")
    if exchange not in (None, "p2p"):
        raise ConfigError(
            f"model.megatron.cp_comm_type={exchange!r} with model.attention=te: packed sequences are exchanged between "
            "context parallel ranks by p2p; remove cp_comm_type"
        )


def check_transformer_engine(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``model.attention=te`` is set, but TransformerEngine is not installed on this machine.

    With ``placement.ray_address``, nothing is checked, because each rank checks its own node.
    """
    if cfg.model.attention != "te" or cfg.placement.ray_address is not None:  # each rank checks its own node
        return
    if not has_transformer_engine():
        raise ConfigError(
            f"model.attention=te, but transformer_engine is not installed here: {INSTALL} (needs an NVIDIA GPU and CUDA), "
            f"or {FIX}"
        )
