"""model.gdn.*: kernels of Gated DeltaNet layers."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GDNConfig(Config):
    """Linear attention of Qwen3-Next and Qwen3.5."""

    backend: str = key(
        "auto",
        "Kernels of Gated DeltaNet layers, a name registered in GDN_BACKENDS: fla (Triton), flashqla (TileLang) or torch (any "
        "device); auto: fla on a GPU, torch on a CPU.",
    )
    cp_mode: str = key(
        "auto",
        "Context parallelism of Gated DeltaNet layers. head: a rank has all tokens for some heads; state: a rank has all "
        "heads for some of the packed tokens, and the ranks exchange states; auto: head if tp * cp divides the heads.",
        choices=("auto", "head", "state"),
    )
    auto_cp: bool | None = key(
        None,
        "Allow FlashQLA to split long sequences within a GPU. A split drops terms that have decayed below e^-10 and depends on "
        "the packing. null: true, unless a pass for old log-probabilities must agree bitwise with the update.",
    )
    allow_unvalidated: bool = key(
        False,
        "Run flashqla on GPUs of compute capability 12.0 and 12.1 (RTX 50, GB10), where it has not been validated.",
    )


def gdn_backend(name: str, device: str) -> str:
    """Return the backend that the config value ``name`` selects on ``device``."""
    if name != "auto":
        return name
    return "fla" if device == "cuda" else "torch"


def gdn_cp_mode(mode: str, key_heads: int, value_heads: int, *, tp: int, cp: int) -> tuple[str, str]:
    """Return the mode (head or state) of a layer with these head counts under context parallelism, and the reason.

    The reason is empty if both modes are possible and ``mode`` chooses one. Raises ``ConfigError`` if ``mode`` is head
    and tp * cp does not divide the heads.
    """
    undivided_keys = [
        f"{heads} {kind} heads" for heads, kind in ((key_heads, "key"), (value_heads, "value")) if heads % (tp * cp)
    ]
    if not undivided_keys:
        reason = f"tp {tp} * cp {cp} divides {key_heads} key and {value_heads} value heads, so states need not pass between ranks"
        return ("head", reason) if mode == "auto" else (mode, "")
    reason = f"tp {tp} * cp {cp} does not divide the {' and the '.join(undivided_keys)} of linear attention"
    if mode == "head":
        raise ConfigError(
            f"model.gdn.cp_mode=head: {reason}; set model.gdn.cp_mode=auto, which then passes states between ranks"
        )
    return "state", reason
