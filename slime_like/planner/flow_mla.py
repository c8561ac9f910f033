"""Attention weights that FlowMLA shards over the data-parallel attention ranks of an engine (docs/flow_mla.md)."""

from __future__ import annotations

import math

from slime_like.errors import ConfigError
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ATTENTION, LATENT, ModelShape, latent_parts

FLOW_CHOICES = ("output", "all")
"""Values of ``--flow-mla`` other than none."""
ARTICLE_SLOTS = 2


def flow_projections(shape: ModelShape, choice: str) -> tuple[str, ...]:
    """Return the projections that ``--flow-mla choice`` selects, by their names in ``rollout.flow_mla.weights``."""
    if choice == "output":
        return ("o_proj",)
    return tuple(_layer_weights(shape, EngineSettings())) if choice == "all" else ()


def check_flow_mla(shape: ModelShape, settings: EngineSettings) -> None:
    """Raise ``ConfigError`` if FlowMLA is on without data-parallel attention, or with a projection that the model lacks."""
    names, available = settings.flow_mla, _layer_weights(shape, settings)
    if names and settings.dp_attention == 1:
        raise ConfigError(
            f"FlowMLA of {shape.name} with --dp-attention 1: only ranks of data-parallel attention hold the same weights; set "
            "--dp-attention above 1, or --flow-mla none"
        )
    if missing := [name for name in names if name not in available]:
        raise ConfigError(
            f"FlowMLA would shard {missing[0]}, which the attention of {shape.name} does not have: set "
            f"{f'--flow-mla all ({", ".join(available)})' if available else '--flow-mla none'}"
        )


def flow_weights(shape: ModelShape, settings: EngineSettings) -> float:
    """Return ``W``: the number of weights per rank, before sharding, in the projections that FlowMLA shards."""
    weights = _layer_weights(shape, settings) if settings.flow_mla else {}
    return _num_layers(shape) * sum(weights[name] for name in settings.flow_mla)


def flow_slots(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the number of weights in a rank's buffers for gathered layers; 0 without FlowMLA.

    This project has ``settings.flow_slots`` buffers, but at most one per layer. Each holds a whole layer.

    The value None stands for the implementation of the FlowMLA article (docs/flow_mla.md), which has two buffers. They need no
    memory for the rank's own part of a layer, which is mapped into them. So their size is ``2 * W / layers * (dp - 1) / dp``,
    where ``W`` is the result of ``flow_weights``.
    """
    s = settings
    if not s.flow_mla:
        return 0.0
    layer = flow_weights(shape, s) / _num_layers(shape)
    if s.flow_slots is None:
        return ARTICLE_SLOTS * layer * (s.dp_attention - 1) / s.dp_attention
    return min(s.flow_slots, _num_layers(shape)) * layer


def flow_saving(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the number of weights per rank that FlowMLA saves: ``flow_weights * (1 - 1 / dp) - flow_slots``."""
    return flow_weights(shape, settings) * (1 - 1 / settings.dp_attention) - flow_slots(shape, settings)


def _num_layers(shape: ModelShape) -> int:
    return shape.count(ATTENTION if shape.latent is None else LATENT)


def _layer_weights(shape: ModelShape, settings: EngineSettings) -> dict[str, float]:
    """Return the number of weights of each attention projection of one layer on one rank, without FlowMLA.

    The keys are the projections' names in ``rollout.flow_mla.weights``.
    """
    tp = settings.attention_tp
    if (m := shape.latent) is not None:
        parts = latent_parts(shape.hidden, m)
        return {
            "o_proj": parts["output"] / tp,
            "q_proj": parts["query_up"] / tp,
            "kv_b_proj": 2 * parts["kv_up"] / tp,  # and its absorbed form
            "a_proj": shape.hidden * (m.query_rank + m.kv_rank + m.rope_dim),
        }
    if (a := shape.attention) is None:
        return {}
    keys = math.ceil(max(1.0, a.kv_heads * settings.dcp / tp)) * a.head_dim
    queries = a.query / tp
    return {"o_proj": shape.hidden * queries, "qkv_proj": shape.hidden * ((2 if a.gated else 1) * queries + 2 * keys)}
