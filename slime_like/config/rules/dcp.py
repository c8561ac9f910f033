"""Rules for ``rollout.dcp``: decode context parallelism, which spreads an engine's KV cache over tensor-parallel ranks.

SGLang 0.5.23 accepts many combinations of settings that compute wrong tokens without an error. They are rejected here at
load, and again in the engine, after SGLang has resolved the settings (``slime_like_plugins.dcp.hooks``). With
``rollout.dcp=auto``, a setting or model that does not allow DCP is accepted, and the plan chooses 1
(``slime_like.cluster.plan.dcp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slime_like.config.rules.gdn_runtime import FLASHINFER, Runtime
from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.dcp import (
    ALL_TO_ALL_BACKENDS,
    BACKEND_FIELDS,
    PAGED_VARIABLE,
    SHARDED_FLASHINFER,
    UNSUPPORTED_FIELDS,
    backend_obstacle,
    default_backend,
    field_obstacle,
    kv_head_obstacle,
    replicated_q_obstacle,
    sharded_backend,
)
from slime_like.config.schema.names import FAMILIES
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

_DECODE_FIELDS = ("decode_attention_backend", "attention_backend")  # the first takes precedence


@dataclass(frozen=True, slots=True)
class DcpObstacle:
    """Setting or environment variable that rules out every ``rollout.dcp`` above 1."""

    setting: str  # as the error message names it, such as key=value
    reason: str
    fix: str  # alternative to rollout.dcp=1


def check_dcp(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.dcp`` conflicts with other keys.

    The model and the machine are not inspected.
    """
    rollout = cfg.rollout
    for name, default in (("dcp_comm", "auto"), ("dcp_replicate_q", False)):
        if rollout.dcp == 1 and (value := getattr(rollout, name)) != default:
            raise ConfigError(
                f"rollout.{name}={str(value).lower()} has no effect with rollout.dcp=1: set rollout.dcp, or remove rollout.{name}"
            )
    size = _configured_size(cfg)
    if size > 1:
        _check_divides_tp(cfg, size)
        _refuse(size, setting_obstacles(cfg))


def check_dcp_device(cfg: TrainConfig, device: str, model: HfConfig | None, environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if engines on ``device`` cannot serve ``model`` with ``rollout.dcp`` and its options.

    ``rollout.symmetric_memory`` is checked even without DCP. ``model`` is None while it is unknown. ``environment``
    contains the engines' environment variables; empty if they are unknown.
    """
    if cfg.rollout.symmetric_memory and device == "cpu":
        raise ConfigError(
            "rollout.symmetric_memory=true with placement.device=cpu: only NCCL has symmetric memory, and ranks on a CPU exchange over "
            "gloo; set rollout.symmetric_memory=false"
        )
    if cfg.rollout.dcp == 1:
        return
    size = _configured_size(cfg)
    if size > 1:
        _refuse(size, device_obstacles(cfg, device, model, environment))
    backends = [decode_backend(cfg, device, latent=latent) for latent in _attention_kinds(model)]
    if cfg.rollout.dcp_comm == "a2a" and not {*backends} & {*ALL_TO_ALL_BACKENDS}:
        field = next((name for name in _DECODE_FIELDS if cfg.rollout.sglang.get(name)), _DECODE_FIELDS[-1])
        fix = f"remove rollout.sglang.{field}" if device == "cpu" else f"set rollout.sglang.{field}=flashinfer"
        raise ConfigError(
            f"rollout.dcp_comm={cfg.rollout.dcp_comm} with placement.device={device} and the attention backend {backends[0]}, "
            f"which cannot exchange by all-to-all; set rollout.dcp_comm=ag_rs, or {fix}"
        )
    if cfg.rollout.dcp_replicate_q and (reason := replicated_q_obstacle(device, cfg.rollout.dcp_comm)):
        raise ConfigError(
            f"rollout.dcp_replicate_q=true with placement.device={device} and rollout.dcp_comm={cfg.rollout.dcp_comm}: {reason}; "
            f"set {'rollout.dcp_comm=a2a' if device == 'cpu' else 'rollout.dcp_replicate_q=false'}"
        )


def check_flashinfer(cfg: TrainConfig, device: str, kernels: Runtime | None, model: HfConfig | None) -> None:
    """Raise ``ConfigError`` if engines would use FlashInfer attention with DCP, but FlashInfer is not installed.

    With ``rollout.dcp=auto``, only a backend set in rollout.sglang counts. ``kernels`` is None if the machine of the engines
    was not probed; nothing is then checked.
    """
    if cfg.rollout.dcp == 1 or kernels is None or kernels.versions.get(FLASHINFER, ()) is not None:
        return
    for field in BACKEND_FIELDS:
        backend = cfg.rollout.sglang.get(field)
        if backend is not None and device == "cuda" and str(backend).startswith("flashinfer"):
            raise ConfigError(
                f"rollout.sglang.{field}={backend} with rollout.dcp={cfg.rollout.dcp} needs the package {FLASHINFER}, which is not "
                f"installed: install the version that SGLang requires, or remove rollout.sglang.{field}"
            )
    if (
        _configured_size(cfg) > 1
        and model is not None
        and model.latent
        and decode_backend(cfg, device, latent=True) == "flashinfer"
    ):
        raise ConfigError(
            f"rollout.dcp={cfg.rollout.dcp} for the latent attention of the model in {model.folder} needs the package {FLASHINFER}, "
            "which is not installed: install the version that SGLang requires, or set rollout.dcp=1"
        )


def decode_backend(cfg: TrainConfig, device: str, *, latent: bool) -> str:
    """Return the attention backend that engines on ``device`` use to decode with ``rollout.dcp``."""
    sglang = cfg.rollout.sglang
    backend = next((sglang[name] for name in _DECODE_FIELDS if sglang.get(name)), None)
    return sharded_backend(str(backend or default_backend(device, latent=latent)), device, latent=latent)


def check_dcp_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if the attention of ``model`` does not fit ``rollout.dcp`` or ``rollout.dcp_replicate_q``."""
    family = FAMILIES.get(model.model_type)
    reason = replicated_q_obstacle(
        "cpu",
        "a2a",
        output_gates=family is not None and family.output_gate,
        projection_norms=family is not None and family.projection_norms,
        latent=model.latent,
    )
    if cfg.rollout.dcp_replicate_q and reason:
        raise ConfigError(
            f"rollout.dcp_replicate_q=true for the model in {model.folder}: {reason}; set rollout.dcp_replicate_q=false"
        )
    size = _configured_size(cfg)
    heads = 1 if model.latent else model.num_kv_heads  # every rank stores the latents of all tokens
    if size > 1 and (reason := kv_head_obstacle(num_attention_ranks(cfg), size, heads)):
        raise ConfigError(f"rollout.dcp={size} for the model in {model.folder}: {reason}")


def check_dcp_states(cfg: TrainConfig, device: str, model: HfConfig | None) -> None:
    """Raise ``ConfigError`` if the prefix cache of a hybrid ``model`` does not fit ``rollout.dcp``."""
    size = _configured_size(cfg)
    if size > 1:
        _refuse(size, state_obstacles(cfg, device, model))


def setting_obstacles(cfg: TrainConfig) -> Iterator[DcpObstacle]:
    """Yield the settings that rule out DCP on every device and for every model."""
    if cfg.run.deterministic:
        reason = "the sums over a sequence would be split over ranks"
        yield DcpObstacle("run.deterministic=true", reason, "set run.deterministic=false")
    for field in UNSUPPORTED_FIELDS:
        value = cfg.rollout.sglang.get(field)
        if reason := field_obstacle(field, value):
            yield DcpObstacle(f"rollout.sglang.{field}={value!r}", reason, f"remove rollout.sglang.{field}")


def device_obstacles(
    cfg: TrainConfig, device: str, model: HfConfig | None, environment: Mapping[str, str]
) -> Iterator[DcpObstacle]:
    """Yield the settings and variables that prevent engines on ``device`` from serving ``model`` with DCP.

    If ``model`` is None, only settings that rule out DCP for every model are yielded.
    """
    kinds = _attention_kinds(model)
    for field in BACKEND_FIELDS:
        if (value := cfg.rollout.sglang.get(field)) is None:
            continue
        names = [sharded_backend(str(value), device, latent=latent) for latent in kinds]
        reasons = [backend_obstacle(name, device, latent=latent) for name, latent in zip(names, kinds, strict=True)]
        if reasons[0] is not None and all(reasons):
            fix = f"remove rollout.sglang.{field}, which selects {default_backend(device, latent=kinds[0])}"
            yield DcpObstacle(f"rollout.sglang.{field}={value}", reasons[0], fix)
        paged = environment.get(PAGED_VARIABLE, "")
        if names == [SHARDED_FLASHINFER] and paged.lower() in ("1", "true", "yes", "y"):
            reason = (
                f"{SHARDED_FLASHINFER} would read new tokens from the cache, where each rank has only a part of them"
            )
            yield DcpObstacle(f"the environment variable {PAGED_VARIABLE}={paged}", reason, f"unset {PAGED_VARIABLE}")


def state_obstacles(cfg: TrainConfig, device: str, model: HfConfig | None) -> Iterator[DcpObstacle]:
    """Yield the setting that makes SGLang cache the states of a hybrid ``model`` at the last token of a sequence.

    With DCP, a cached prefix has to end at a page boundary instead; a page has ``rollout.dcp`` tokens.
    """
    options = cfg.rollout.sglang
    strategy = options.get("mamba_radix_cache_strategy", "auto")
    if options.get("disable_radix_cache") or model is None or not model.gdn:
        return
    if strategy == "no_buffer":
        setting = "rollout.sglang.mamba_radix_cache_strategy=no_buffer"
    elif strategy == "auto" and device == "cuda" and options.get("disable_overlap_schedule"):
        setting = "rollout.sglang.disable_overlap_schedule=True"
    else:
        return
    reason = (
        "the states of linear-attention layers would be kept at the last token of a sequence, but a cached prefix ends at a "
        "page of rollout.dcp tokens"
    )
    fix = "set rollout.sglang.mamba_radix_cache_strategy=extra_buffer"
    yield DcpObstacle(f"{setting} for the hybrid model in {model.folder}", reason, fix)


def num_attention_ranks(cfg: TrainConfig) -> int:
    """Return the number of ranks of an engine over which SGLang splits attention heads."""
    return cfg.rollout.tp // cfg.rollout.dp_attention


def _attention_kinds(model: HfConfig | None) -> tuple[bool, ...]:
    """Return the possible values of ``model.latent``, both if ``model`` is None."""
    return (False, True) if model is None else (model.latent,)


def _configured_size(cfg: TrainConfig) -> int:
    """Return ``rollout.dcp``, or 1 if it is auto, because the plan then chooses a size that fits."""
    return 1 if isinstance(cfg.rollout.dcp, str) else cfg.rollout.dcp


def _refuse(size: int, obstacles: Iterator[DcpObstacle]) -> None:
    """Raise ``ConfigError`` with the first obstacle, if there is one."""
    for obstacle in obstacles:
        raise ConfigError(
            f"{obstacle.setting} with rollout.dcp={size}: {obstacle.reason}; {obstacle.fix}, or set rollout.dcp=1"
        )


def _check_divides_tp(cfg: TrainConfig, size: int) -> None:
    rollout, ranks = cfg.rollout, num_attention_ranks(cfg)
    if ranks % size == 0:
        return
    source = f"rollout.tp={rollout.tp}" + (
        f" / rollout.dp_attention={rollout.dp_attention}" if rollout.dp_attention > 1 else ""
    )
    sizes = [str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    raise ConfigError(
        f"rollout.dcp={size} does not divide the {ranks} attention ranks of an engine ({source}): "
        f"set rollout.dcp={' or '.join(sizes)}. The KV cache grows only if rollout.dcp divides {ranks} / (KV heads of the model)"
    )
