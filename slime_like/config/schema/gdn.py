"""model.gdn.*: the kernels of Gated DeltaNet layers."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GDNConfig(Config):
    """The linear attention of Qwen3-Next and Qwen3.5."""

    backend: str = key(
        "auto",
        "Kernels of Gated DeltaNet layers (table GDN_BACKENDS): fla (Triton), flashqla (TileLang) or torch (any device); "
        "auto: fla on a GPU, torch on a CPU.",
    )
    cp_mode: str = key(
        "auto",
        "Context parallelism of Gated DeltaNet layers. head: every rank has all tokens of its share of the heads; state: all "
        "heads of a range of the packed stream, states are passed on; auto: head where tp * cp divides the heads.",
        choices=("auto", "head", "state"),
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


def gdn_cp_mode(asked: str, key_heads: int, value_heads: int, *, tp: int, cp: int) -> tuple[str, str]:
    """(head or state, why) for a layer of so many heads under context parallelism.

    Raises ``ConfigError`` where ``asked`` is head and the ranks do not divide the heads.
    """
    left = [
        f"{heads} {kind} heads" for heads, kind in ((key_heads, "key"), (value_heads, "value")) if heads % (tp * cp)
    ]
    if not left:
        why = f"tp {tp} * cp {cp} divides {key_heads} key and {value_heads} value heads: one pass of the rule is enough"
        return ("head", why) if asked == "auto" else (asked, "")
    why = f"tp {tp} * cp {cp} does not divide the {' and the '.join(left)} of linear attention"
    if asked == "head":
        raise ConfigError(f"model.gdn.cp_mode=head: {why}; set model.gdn.cp_mode=auto, which passes states on there")
    return "state", why
