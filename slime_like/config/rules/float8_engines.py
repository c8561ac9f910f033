"""Rules for ``rollout.weight_dtype=float8``, which makes engines serve the float8 weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.rollout import FLOAT8
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.hardware import known_gpu

SETTING = f"rollout.weight_dtype={FLOAT8}"
OFF = "or remove rollout.weight_dtype"
BLOCK = (128, 128)  # rows and columns per scale in SGLang's kernels
CAPABILITY = (
    8,
    9,
)  # minimum compute capability. SGLang's Triton kernels for float8 experts do not compile for older GPUs.


def check_float8_engines(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if engines with float8 weights conflict with other keys."""
    rollout = cfg.rollout
    if rollout.weight_dtype != FLOAT8:
        return
    if cfg.run.mode != "rollout_only":
        raise ConfigError(
            f"{SETTING} with run.mode={cfg.run.mode}: a push has the trainer's weights in model.dtype, without scales, which float8 engines "
            f"cannot load; set run.mode=rollout_only, {OFF}"
        )
    if cfg.placement.device == "cpu" or cfg.model.dtype == "float32":
        key = "placement.device=cpu" if cfg.placement.device == "cpu" else "model.dtype=float32"
        raise ConfigError(
            f"{SETTING} with {key}: SGLang's float8 kernels need GPUs and bfloat16 activations; remove {key}, {OFF}"
        )
    if rollout.remote_experts.enabled:
        raise ConfigError(
            f"{SETTING} with rollout.remote_experts: workers compute experts without scales; remove the keys of "
            f"rollout.remote_experts, {OFF}"
        )
    if rollout.sglang.get("quantization") is not None:
        raise ConfigError(
            f"{SETTING} with rollout.sglang.quantization={rollout.sglang['quantization']!r}: the checkpoint determines the format; "
            "remove rollout.sglang.quantization"
        )
    if rollout.flow_mla.enabled and "kv_b_proj" in rollout.flow_mla.weights:
        raise ConfigError(
            f"{SETTING} with rollout.flow_mla.weights={rollout.flow_mla.weights}: SGLang computes weights of a different type from a "
            f"float8 kv_b_proj, which cannot be sharded; remove kv_b_proj from rollout.flow_mla.weights, {OFF}"
        )


def check_float8_device(cfg: TrainConfig, device: str) -> None:
    """Raise ``ConfigError`` if ``placement.device=auto`` has selected a CPU for engines with float8 weights."""
    if cfg.rollout.weight_dtype == FLOAT8 and device == "cpu":
        nodes = "" if cfg.placement.ray_address is None else "set placement.device=cuda if other nodes have GPUs, or "
        raise ConfigError(
            f"{SETTING}: SGLang's float8 kernels need a GPU, and none is visible; {nodes}{OFF.removeprefix('or ')}"
        )


def check_float8_gpus(cfg: TrainConfig, names: Iterable[str], other_capability: tuple[int, int] | None = None) -> None:
    """Raise ``ConfigError`` if engines with float8 weights would run on GPUs that do not support float8.

    ``names`` are the names of the GPUs. ``other_capability`` is the compute capability of GPUs missing from the planner's
    table, or None if it is unknown.
    """
    if cfg.rollout.weight_dtype != FLOAT8:
        return
    for name in names:
        gpu = known_gpu(name)
        capability = other_capability if gpu is None else gpu.capability
        if capability is not None and capability < CAPABILITY:
            number, minimum = (".".join(map(str, value)) for value in (capability, CAPABILITY))
            raise ConfigError(
                f"{SETTING} on {name}, a GPU of compute capability {number}: SGLang's float8 kernels need {minimum} or newer "
                f"(L4, L40S, H20, H100); use such GPUs, {OFF}"
            )


def check_float8_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` unless the checkpoint has float8 weights with scales that SGLang's kernels support.

    A model from the planner's table has no folder, so its format is checked only when the run starts.
    """
    if cfg.rollout.weight_dtype != FLOAT8 or not Path(model.folder).is_dir():
        return
    block = model.float8.block if model.float8 is not None else None
    if block != BLOCK:
        weights_text = (
            "no float8 weights"
            if model.float8 is None
            else f"one scale per {'matrix' if block is None else f'block of {list(block)}'}"
        )
        raise ConfigError(
            f"{SETTING}: the checkpoint in {model.folder} has {weights_text}, but engines need float8 weights with one scale per "
            f"block of {list(BLOCK)} (quantization_config.weight_block_size); give such a checkpoint, {OFF}"
        )
