"""Decoders with blocks of Gated DeltaNet or gated attention: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

from slime_like.train.megatron.families.base import Replicated, RowParallel, Stacked, Weight
from slime_like.train.megatron.families.dense import DenseDecoder
from slime_like.train.megatron.families.sections import GatedQKV, Sections

SYMBOLS = {"linear_attention": "G", "full_attention": "*"}
"""Entry of the HF config's layer_types -> layer of megatron's hybrid stack."""


class HybridDecoder(DenseDecoder):
    """Hybrid decoder with zero-centred norms (except DeltaNet's gated norm), gated attention and partial rotary embedding.

    A subclass defines how HF stores the input projections of the DeltaNet.
    """

    qk_norm = True
    untrained_prefixes = ("mtp.", "model.visual.")
    shape_keys = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )

    def __init__(self, hf: Any, tp: int) -> None:
        self.composite = hasattr(hf, "text_config")
        super().__init__(_text(hf), tp)
        self.require("attention_bias", False)
        self.require("attn_output_gate", True)
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            self.require_divisible(key)
        for kind in sorted(set(self.hf.layer_types) - SYMBOLS.keys()):
            self.refuse(f"layer_types with {kind!r}", " and ".join(map(repr, SYMBOLS)))

    @property
    def root(self) -> str:
        return "model.language_model" if self.composite else "model"

    def blocks(self) -> tuple[str, ...]:
        return tuple(SYMBOLS[kind] + "-" for kind in self.hf.layer_types)

    def transformer_fields(self) -> dict[str, Any]:
        return {
            **super().transformer_fields(),
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            **{key: getattr(self.hf, key) for key in self.shape_keys},  # megatron's fields have the same names
        }

    def mixer(self, block: int, prefix: str) -> dict[str, Weight]:
        if self.hf.layer_types[block] == "full_attention":
            return self._with_gate(self.attention(prefix))
        return self._delta_net(prefix)

    def _with_gate(self, attention: dict[str, Weight]) -> dict[str, Weight]:
        """Return the weights ``attention`` with a gate per query channel: the query projection is twice as wide."""
        key = "self_attention.linear_qkv.weight"
        plain = attention[key]
        (queries, hidden), *key_value_shapes = plain.shapes
        shapes = ((2 * queries, hidden), *key_value_shapes)
        return {**attention, key: GatedQKV(plain.names, shapes, self.hf.num_key_value_heads)}

    def _delta_net(self, prefix: str) -> dict[str, Weight]:
        hf, net = self.hf, f"{prefix}.linear_attn"
        key, value = self.channels
        heads, size = hf.linear_num_value_heads, hf.linear_value_head_dim
        conv = Sections(
            (f"{net}.conv1d.weight",), ((2 * key + value, 1, hf.linear_conv_kernel_dim),), (key, key, value)
        )
        norm = Replicated((f"{prefix}.input_layernorm.weight",), ((hf.hidden_size,),))
        return {
            "input_layernorm.weight": norm,
            "self_attention.in_proj.weight": self.in_proj(net),
            "self_attention.conv1d.weight": conv,
            "self_attention.A_log": Stacked((f"{net}.A_log",), ((heads,),)),
            "self_attention.dt_bias": Stacked((f"{net}.dt_bias",), ((heads,),)),
            "self_attention.out_norm.weight": Replicated((f"{net}.norm.weight",), ((size,),)),
            "self_attention.out_proj.weight": RowParallel((f"{net}.out_proj.weight",), ((hf.hidden_size, value),)),
        }

    @property
    def channels(self) -> tuple[int, int]:
        """(Key channels, value channels) of a DeltaNet layer, which has as many query channels as key channels."""
        hf = self.hf
        return hf.linear_num_key_heads * hf.linear_key_head_dim, hf.linear_num_value_heads * hf.linear_value_head_dim

    @abstractmethod
    def in_proj(self, net: str) -> Weight:
        """Return the input projection of a DeltaNet layer, with sections query, key, value, gate, beta and alpha."""


def _text(hf: Any) -> Any:
    """Return a copy of a vision model's text config with the outer ``tie_word_embeddings``; return other configs unchanged."""
    if not hasattr(hf, "text_config"):
        return hf
    text = copy.copy(hf.text_config)
    text.tie_word_embeddings = hf.tie_word_embeddings
    return text
