"""Description of a model family that can be read without importing the family, and a table of unsupported model types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """Import path of a ``Family`` subclass, and the properties of the family that differ from the defaults."""

    path: str  # "module:attribute"
    output_gate: bool = False  # attention has an output gate as wide as its queries
    head_norms: bool = False  # attention has a norm on every query and key head
    projection_norms: bool = False  # attention has a norm over all query heads, and one over all key heads
    qkv_bias: bool = False  # query, key and value have biases, whether or not config.json sets attention_bias
    engine_ties: bool = True  # SGLang's model reads tie_word_embeddings
    fused_engine_model: str = (
        ""  # SGLang's class, if sglang_cpu's fused forward can replace its forward; empty: SGLang's forward runs
    )
    bitwise: bool = False  # tested: on a CPU with run.deterministic, engine and trainer agree bitwise
    config_class: str = ""  # model_type whose config class in transformers reads config.json; empty: the family's own
    engine_dp_attention: bool = True  # SGLang's model supports attn_dp_size, data-parallel attention
    engine_rotary_dim: bool = False  # SGLang's model reads rotary_dim, the number of rotated channels of a head
    yarn: bool = False  # rope_type=yarn is supported
    engine_fields: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that SGLang reads in config.json but transformers does not write."""


_SPARSE_ATTENTION = (
    "its attention is sparse (DSA: an indexer chooses the keys of each query), which neither the trainer nor the CPU engines "
    "implement, and an engine that attends to selected keys differs from a trainer that attends to all; train a model with full "
    "attention"
)
REFUSED_FAMILIES = {
    "deepseek_v32": _SPARSE_ATTENTION,
    "glm4_moe_lite": "latent attention with GLM's tensor names is not supported; train GLM-4.5-Air (glm4_moe)",
    "glm_moe_dsa": _SPARSE_ATTENTION,
}
"""Reason and fix for each unsupported ``model_type``."""
