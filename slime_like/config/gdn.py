"""model.gdn.*: the kernels of Gated DeltaNet layers, and what a choice needs. The packages are looked for, never imported."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.base import Config, key


@dataclass(kw_only=True)
class GDNConfig(Config):
    """The linear attention of Qwen3-Next and Qwen3.5."""

    backend: str = key(
        "auto", "Kernels of Gated DeltaNet layers (table GDN_BACKENDS): torch runs anywhere; auto: torch on a CPU."
    )


def gdn_backend(name: str, device: str) -> str:
    """The backend that ``name`` stands for on ``device``."""
    if name != "auto":
        return name
    return "torch"
