"""Device of trainer and engines, and checks of device-specific settings."""

from __future__ import annotations

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.rules.dcp import check_dcp_device, check_dcp_states, check_flashinfer
from slime_like.config.rules.float8_engines import check_float8_device, check_float8_gpus
from slime_like.config.rules.hf import HfConfig
from slime_like.config.rules.trained_sampling import check_drafts
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def resolve_device(cfg: TrainConfig, model: HfConfig | None, machine: Machine, decisions: PlanDecisions) -> str:
    """Return the device of trainer and engines, after checking device-specific settings.

    ``model`` is None while it is unknown. Raises ``ConfigError`` if a setting does not support the device, if engines on this
    machine need FlashInfer and it is not installed, or if ``placement.device=cuda`` is set for a run on this machine and no GPU
    is visible.
    """
    device = cfg.placement.device
    if device == "auto":
        device = "cuda" if machine.num_gpus else "cpu"
        reason = f"{machine.num_gpus} GPUs are visible" if machine.is_local else f"{machine.num_gpus} GPUs on the nodes"
        decisions.add("placement.device", device, reason)
    if device == "cuda" and not machine.num_gpus and cfg.placement.ray_address is None:
        raise ConfigError(
            "placement.device=cuda, but no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES): set placement.device=cpu"
        )
    check_drafts(cfg, device)
    check_float8_device(cfg, device)
    if device == "cuda" and (cfg.placement.ray_address is None or not machine.is_local):
        kernels = machine.kernels
        check_float8_gpus(cfg, machine.gpu_names, None if kernels is None else kernels.capability)
    check_dcp_device(cfg, device, model, machine.environment)
    check_flashinfer(cfg, device, machine.kernels if cfg.placement.ray_address is None else None, model)
    check_dcp_states(cfg, device, model)
    return device
