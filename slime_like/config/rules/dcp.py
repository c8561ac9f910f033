"""Rules of ``rollout.dcp``: decode context parallelism, which spreads an engine's KV cache over its tensor-parallel ranks.

SGLang 0.5.23 accepts many combinations that compute wrong tokens without an error. They are refused here at load, and
again in the engine, on the values that SGLang resolves (``slime_like_plugins.dcp.hooks``).
"""

from __future__ import annotations

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.dcp import (
    ALL_TO_ALL_BACKENDS,
    BACKEND_FIELDS,
    DEFAULT_BACKENDS,
    UNSUPPORTED_FIELDS,
    backend_obstacle,
    field_obstacle,
    kv_head_obstacle,
    sharded_backend,
)
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def check_dcp(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.dcp`` does not fit other keys. Needs no file and no machine."""
    rollout = cfg.rollout
    if rollout.dcp == 1:
        if rollout.dcp_comm != "auto":
            raise ConfigError(
                f"rollout.dcp_comm={rollout.dcp_comm} has no effect with rollout.dcp=1: set rollout.dcp, or remove rollout.dcp_comm"
            )
        return
    _divides_tp(cfg)
    if cfg.run.deterministic:
        raise ConfigError(
            f"rollout.dcp={rollout.dcp} with run.deterministic=true: the sums over a sequence would be split over ranks; "
            "set rollout.dcp=1, or run.deterministic=false"
        )
    for field in UNSUPPORTED_FIELDS:
        value = rollout.sglang.get(field)
        if reason := field_obstacle(field, value):
            raise ConfigError(
                f"rollout.sglang.{field}={value!r} with rollout.dcp={rollout.dcp}: {reason}; remove it, or set rollout.dcp=1"
            )


def check_dcp_device(cfg: TrainConfig, device: str) -> None:
    """Raise ``ConfigError`` if the attention backend of engines on ``device`` cannot serve with ``rollout.dcp``."""
    if cfg.rollout.dcp == 1:
        return
    for field in BACKEND_FIELDS:
        backend = cfg.rollout.sglang.get(field)
        if backend is not None and (reason := backend_obstacle(sharded_backend(str(backend), device), device)):
            raise ConfigError(
                f"rollout.sglang.{field}={backend} with rollout.dcp={cfg.rollout.dcp}: {reason}; "
                f"remove it, which selects {DEFAULT_BACKENDS[device]}, or set rollout.dcp=1"
            )
    backend = decode_backend(cfg, device)
    if cfg.rollout.dcp_comm == "a2a" and backend not in ALL_TO_ALL_BACKENDS:
        raise ConfigError(
            f"rollout.dcp_comm={cfg.rollout.dcp_comm} with placement.device={device} and the attention backend {backend}, which "
            "always exchanges by all-gather and all-reduce; set rollout.dcp_comm=ag_rs, or "
            "rollout.sglang.attention_backend=flashinfer"
        )


def decode_backend(cfg: TrainConfig, device: str) -> str:
    """Return the attention backend with which engines on ``device`` decode under ``rollout.dcp``."""
    sglang = cfg.rollout.sglang
    backend = sglang.get("decode_attention_backend") or sglang.get("attention_backend") or DEFAULT_BACKENDS[device]
    return sharded_backend(str(backend), device)


def check_dcp_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if the attention of ``model`` cannot be sharded over ``rollout.dcp`` ranks."""
    dcp = cfg.rollout.dcp
    if dcp == 1:
        return
    if model.windowed:
        raise ConfigError(
            f"rollout.dcp={dcp} with model.hf_checkpoint={model.folder!r}, whose config.json has layers with sliding windows: "
            "SGLang does not shard their KV cache; set rollout.dcp=1"
        )
    if reason := kv_head_obstacle(_attention_tp(cfg), dcp, model.num_kv_heads):
        raise ConfigError(f"rollout.dcp={dcp} for the model in {model.folder}: {reason}")


def check_dcp_states(cfg: TrainConfig, device: str, model: HfConfig | None) -> None:
    """Raise ``ConfigError`` if ``rollout.dcp`` needs the prefix cache off on ``device`` and the config turns it on."""
    cached = cfg.rollout.sglang.get("disable_radix_cache") is False
    if cached and cfg.rollout.dcp != 1 and device == "cpu" and model is not None and model.gdn is not None:
        raise ConfigError(
            f"rollout.sglang.disable_radix_cache=False with rollout.dcp={cfg.rollout.dcp} and the hybrid model in {model.folder}: "
            "the state of a linear-attention layer is only kept at the last token of a sequence, so engines on a CPU have no "
            "prefix cache with DCP; remove it, or set rollout.dcp=1"
        )


def _attention_tp(cfg: TrainConfig) -> int:
    """Return the number of ranks of an engine over which SGLang splits attention heads."""
    return cfg.rollout.tp // int(cfg.rollout.sglang.get("attn_dp_size", 1))


def _divides_tp(cfg: TrainConfig) -> None:
    rollout, tp = cfg.rollout, _attention_tp(cfg)
    if tp % rollout.dcp == 0:
        return
    attn_dp = rollout.tp // tp
    ranks = f"rollout.tp={rollout.tp}" + (f" / rollout.sglang.attn_dp_size={attn_dp}" if attn_dp > 1 else "")
    sizes = [str(size) for size in range(1, tp + 1) if tp % size == 0]
    raise ConfigError(
        f"rollout.dcp={rollout.dcp} does not divide the {tp} attention ranks of an engine ({ranks}), which it groups: "
        f"set rollout.dcp={' or '.join(sizes)}"
    )
