"""model.gdn.*: the kernels of Gated DeltaNet layers."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.base import Config, key


@dataclass(kw_only=True)
class GDNConfig(Config):
    """The linear attention of Qwen3-Next and Qwen3.5."""

    backend: str = key(
        "auto",
        "Kernels of Gated DeltaNet layers (table GDN_BACKENDS): fla (Triton), flashqla (TileLang) or torch (any device); "
        "auto: fla on a GPU, torch on a CPU.",
    )
    auto_cp: bool | None = key(
        None,
        "FlashQLA's splitting of long sequences within a GPU, which drops what has decayed below e^-10 and depends on what "
        "is packed together; null: on, unless a pass for old log-probabilities must agree with the update bit by bit.",
    )
    allow_unvalidated: bool = key(
        False,
        "Run flashqla on GPUs of compute capability 12.0 and 12.1 (RTX 50, GB10), where it has not been validated.",
    )


def gdn_backend(name: str, device: str) -> str:
    """The backend that ``name`` stands for on ``device``."""
    if name != "auto":
        return name
    return "fla" if device == "cuda" else "torch"
