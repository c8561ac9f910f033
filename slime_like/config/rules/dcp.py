"""Rules of ``rollout.dcp``: decode context parallelism, which spreads an engine's KV cache over its tensor-parallel ranks.

SGLang 0.5.23 accepts many combinations that compute wrong tokens without an error. They are refused here at load, and
again in the engine, on the values that SGLang resolves (``slime_like_plugins.dcp.hooks``). With ``rollout.dcp=auto``, nothing is
refused: the plan chooses 1 if a setting or the model does not allow more (``slime_like.cluster.plan.dcp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

WINDOWS = "SGLang does not shard the KV cache of layers with sliding windows"


@dataclass(frozen=True, slots=True)
class DcpObstacle:
    """Setting that excludes every ``rollout.dcp`` above 1."""

    setting: str  # key=value
    reason: str
    fix: str  # besides rollout.dcp=1


def check_dcp(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.dcp`` does not fit other keys. Needs no file and no machine."""
    rollout = cfg.rollout
    if rollout.dcp == 1 and rollout.dcp_comm != "auto":
        raise ConfigError(
            f"rollout.dcp_comm={rollout.dcp_comm} has no effect with rollout.dcp=1: set rollout.dcp, or remove rollout.dcp_comm"
        )
    size = _configured_size(cfg)
    if size > 1:
        _divides_tp(cfg, size)
        _refuse(size, setting_obstacles(cfg))


def check_dcp_device(cfg: TrainConfig, device: str) -> None:
    """Raise ``ConfigError`` if engines on ``device`` cannot serve with ``rollout.dcp`` and ``rollout.dcp_comm``."""
    if cfg.rollout.dcp == 1:
        return
    size = _configured_size(cfg)
    if size > 1:
        _refuse(size, device_obstacles(cfg, device))
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
    size = _configured_size(cfg)
    if size == 1:
        return
    if model.windowed:
        raise ConfigError(
            f"rollout.dcp={size} with model.hf_checkpoint={model.folder!r}, whose config.json has sliding windows: {WINDOWS}; "
            "set rollout.dcp=1"
        )
    if reason := kv_head_obstacle(num_attention_ranks(cfg), size, model.num_kv_heads):
        raise ConfigError(f"rollout.dcp={size} for the model in {model.folder}: {reason}")


def check_dcp_states(cfg: TrainConfig, device: str, model: HfConfig | None) -> None:
    """Raise ``ConfigError`` if ``rollout.dcp`` needs the prefix cache off on ``device`` and the config turns it on."""
    size = _configured_size(cfg)
    if size > 1:
        _refuse(size, state_obstacles(cfg, device, model))


def setting_obstacles(cfg: TrainConfig) -> Iterator[DcpObstacle]:
    """Yield the settings that exclude DCP on every device and for every model."""
    if cfg.run.deterministic:
        reason = "the sums over a sequence would be split over ranks"
        yield DcpObstacle("run.deterministic=true", reason, "set run.deterministic=false")
    for field in UNSUPPORTED_FIELDS:
        value = cfg.rollout.sglang.get(field)
        if reason := field_obstacle(field, value):
            yield DcpObstacle(f"rollout.sglang.{field}={value!r}", reason, "remove it")


def device_obstacles(cfg: TrainConfig, device: str) -> Iterator[DcpObstacle]:
    """Yield the attention backends that cannot serve with DCP on ``device``."""
    for field in BACKEND_FIELDS:
        backend = cfg.rollout.sglang.get(field)
        if backend is not None and (reason := backend_obstacle(sharded_backend(str(backend), device), device)):
            fix = f"remove it, which selects {DEFAULT_BACKENDS[device]}"
            yield DcpObstacle(f"rollout.sglang.{field}={backend}", reason, fix)


def state_obstacles(cfg: TrainConfig, device: str, model: HfConfig | None) -> Iterator[DcpObstacle]:
    """Yield a prefix cache that the config turns on for a hybrid ``model``, if engines on ``device`` have none with DCP."""
    if cfg.rollout.sglang.get("disable_radix_cache") is False and device == "cpu" and model is not None and model.gdn:
        setting = f"rollout.sglang.disable_radix_cache=False for the hybrid model in {model.folder}"
        reason = (
            "the state of a linear-attention layer is only kept at the last token of a sequence, so engines on a CPU have no "
            "prefix cache with DCP"
        )
        yield DcpObstacle(setting, reason, "remove it")


def num_attention_ranks(cfg: TrainConfig) -> int:
    """Return the number of ranks of an engine over which SGLang splits attention heads."""
    return cfg.rollout.tp // int(cfg.rollout.sglang.get("attn_dp_size", 1))


def _configured_size(cfg: TrainConfig) -> int:
    """Return ``rollout.dcp``; 1 for auto, with which the plan chooses a size that fits."""
    return 1 if isinstance(cfg.rollout.dcp, str) else cfg.rollout.dcp


def _refuse(size: int, obstacles: Iterator[DcpObstacle]) -> None:
    """Raise ``ConfigError`` with the first obstacle, if there is one."""
    for obstacle in obstacles:
        raise ConfigError(
            f"{obstacle.setting} with rollout.dcp={size}: {obstacle.reason}; {obstacle.fix}, or set rollout.dcp=1"
        )


def _divides_tp(cfg: TrainConfig, size: int) -> None:
    rollout, ranks = cfg.rollout, num_attention_ranks(cfg)
    if ranks % size == 0:
        return
    attn_dp = rollout.tp // ranks
    source = f"rollout.tp={rollout.tp}" + (f" / rollout.sglang.attn_dp_size={attn_dp}" if attn_dp > 1 else "")
    sizes = [str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    raise ConfigError(
        f"rollout.dcp={size} does not divide the {ranks} attention ranks of an engine ({source}), which it groups: "
        f"set rollout.dcp={' or '.join(sizes)}"
    )
