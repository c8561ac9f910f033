"""Rules for ``rollout.flow_mla``, which shards attention weights over the ranks of data-parallel attention.

The engine applies the same conditions to the values that SGLang resolves (``slime_like_plugins.flow_mla``).
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.flow_mla import (
    P2P_FIELDS,
    SKIP_VARIABLE,
    field_obstacle,
    missing_weights,
    required_values,
    skips_forwards,
)
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import ConfigError

OFF = "set rollout.flow_mla.enabled=false"


def check_flow_mla(rollout: RolloutConfig, environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if ``rollout.flow_mla`` conflicts with other keys or the ``environment`` of the engines."""
    if not rollout.flow_mla.enabled:
        return
    if rollout.dp_attention == 1:
        raise ConfigError(
            "rollout.flow_mla.enabled=true with rollout.dp_attention=1: only ranks of data-parallel attention hold the same "
            f"weights; set rollout.dp_attention to a divisor of rollout.tp={rollout.tp} above 1, or {OFF}"
        )
    transport = rollout.flow_mla.transport
    for field in required_values(transport):
        value = rollout.sglang.get(field)
        if reason := field_obstacle(field, value, transport):
            keys = "rollout.flow_mla.enabled=true" + " and rollout.flow_mla.transport=p2p" * (field in P2P_FIELDS)
            raise ConfigError(
                f"rollout.sglang.{field}={value!r} with {keys}: {reason}; remove rollout.sglang.{field}, or {OFF}"
            )
    if skips_forwards(environment):
        raise ConfigError(
            f"the environment variable {SKIP_VARIABLE}={environment[SKIP_VARIABLE]} with rollout.flow_mla.enabled=true: ranks without "
            f"requests would skip forwards, and a gather needs all ranks; unset {SKIP_VARIABLE}, or {OFF}"
        )


def check_flow_mla_model(rollout: RolloutConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if flow_mla is enabled with a projection that the attention of ``model`` does not have."""
    missing = missing_weights(rollout.flow_mla.weights, latent=model.latent)
    if rollout.flow_mla.enabled and missing:
        raise ConfigError(f"rollout.flow_mla.weights {missing} ({model.folder})")
