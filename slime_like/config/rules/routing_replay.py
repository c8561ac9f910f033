"""Rules for ``algo.routing_replay``: the trainer reuses the experts that the engine or an earlier pass chose for a token."""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

_REQUIRED_VALUES: Mapping[str, tuple[object, str]] = {
    "pp_size": (1, "SGLang returns the experts of the last pipeline stage only"),
    "speculative_algorithm": (None, "SGLang's buffer of experts has no room for drafts"),
    "enable_hierarchical_cache": (False, "keys and values that return from the host's cache lose their experts"),
    "disaggregation_mode": ("null", "the engine that decodes does not know the experts of the prompt"),
}
"""Field of SGLang's ``ServerArgs`` -> (its default, which is required; reason why replies lack experts with other values)."""


def check_routing_replay(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if the choice of experts cannot be recorded or replayed.

    No file is read. ``algo.routing_replay_reference`` without a reference is an error too.
    """
    algo = cfg.algo
    if not isinstance(algo, PolicyConfig) or algo.routing_replay == "off":
        return
    key = f"algo.routing_replay={algo.routing_replay}"
    if cfg.model.megatron.get("moe_router_fusion"):
        raise ConfigError(
            f"model.megatron.moe_router_fusion=true with {key}: the fused router always chooses experts itself; remove "
            "model.megatron.moe_router_fusion"
        )
    if algo.routing_replay == "old":
        if algo.use_rollout_logprobs:
            raise ConfigError(
                f"{key} with algo.use_rollout_logprobs=true: no pass for old log-probabilities records experts; set "
                "algo.routing_replay=rollout"
            )
        return
    coefficients = [name for name in ("kl_loss_coef", "kl_coef") if hasattr(algo, name)]
    if algo.routing_replay_reference and not any(getattr(algo, name) > 0 for name in coefficients):
        names = " or ".join(f"algo.{name}" for name in coefficients)
        raise ConfigError(
            f"algo.routing_replay_reference=true without a reference: set {names} above 0, or remove "
            "algo.routing_replay_reference"
        )
    if cfg.rollout.sglang.get("enable_return_routed_experts") is False:
        raise ConfigError(
            f"rollout.sglang.enable_return_routed_experts=false with {key}, which replays these experts: remove "
            "rollout.sglang.enable_return_routed_experts"
        )
    for field, (required, reason) in _REQUIRED_VALUES.items():
        value = cfg.rollout.sglang.get(field, required)
        if value != required:
            raise ConfigError(
                f"rollout.sglang.{field}={value!r} with {key}: {reason}; remove rollout.sglang.{field}, or set algo.routing_replay "
                "to old or off"
            )


def check_replayed_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if experts are to be replayed, but ``model`` has none or chooses fewer than 2 per token."""
    if not isinstance(cfg.algo, PolicyConfig) or cfg.algo.routing_replay == "off":
        return
    key = f"algo.routing_replay={cfg.algo.routing_replay}"
    if not model.num_experts:
        raise ConfigError(
            f"{key}: the model in {model.folder} (model_type {model.model_type}) has no experts; set algo.routing_replay=off"
        )
    if model.experts_per_token < 2:
        raise ConfigError(
            f"{key}: config.json of the model in {model.folder} has num_experts_per_tok={model.experts_per_token}, and replay "
            "needs at least 2; set algo.routing_replay=off"
        )
