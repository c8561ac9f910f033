"""Rules for the engine sizes that the capacity planner reads. SGLang itself does not check most of them."""

from __future__ import annotations

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import ConfigError

COUNTS = ("max_total_tokens", "max_prefill_tokens", "max_mamba_cache_size")
"""Fields of ``rollout.sglang`` with a number of tokens or states."""


def check_engine_sizes(rollout: RolloutConfig) -> None:
    """Raise ``ConfigError`` if an engine size is out of range, or ``rollout.dp_attention`` does not divide ``rollout.tp``."""
    share = rollout.sglang.get("mem_fraction_static")
    if share is not None and not 0 < share < 1:
        raise ConfigError(
            f"rollout.sglang.mem_fraction_static={share} is not between 0 and 1: set the share of an engine's memory for "
            "weights and KV cache, or remove rollout.sglang.mem_fraction_static"
        )
    for field in COUNTS:
        value = rollout.sglang.get(field)
        if value is not None and value < 1:
            raise ConfigError(f"rollout.sglang.{field}={value} must be above 0: raise or remove rollout.sglang.{field}")
    groups = rollout.dp_attention
    if rollout.tp % groups:
        raise ConfigError(
            f"rollout.dp_attention={groups} does not divide the rollout.tp={rollout.tp} GPUs of an engine, over "
            "which it splits the attention: set a divisor of rollout.tp; to add engines, set rollout.num_engines"
        )
