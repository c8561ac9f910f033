"""Qwen3.5: Gated DeltaNet and gated attention, with an MLP or experts; the language part of a vision model."""

from __future__ import annotations

from slime_like.train.megatron.families.base import Weight
from slime_like.train.megatron.families.experts import Experts
from slime_like.train.megatron.families.hybrid import HybridDecoder
from slime_like.train.megatron.families.sections import Sections


class Qwen35(HybridDecoder):
    """Names as in transformers' ``Qwen3_5ForCausalLM``, or as in ``Qwen3_5ForConditionalGeneration``.

    Text has one position per token, and its rotary embedding by three positions (mrope) is then the plain one.
    """

    model_types = ("qwen3_5", "qwen3_5_text")

    def in_proj(self, net: str) -> Weight:
        hidden, heads = self.hf.hidden_size, self.hf.linear_num_value_heads
        key, value = self.channels
        names = tuple(f"{net}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        shapes = tuple((rows, hidden) for rows in (2 * key + value, value, heads, heads))
        return Sections(names, shapes, (key, key, value, value, heads, heads))


class Qwen35Moe(Experts, Qwen35):
    """Names as in transformers' ``Qwen3_5MoeForCausalLM``, or as in ``Qwen3_5MoeForConditionalGeneration``."""

    model_types = ("qwen3_5_moe", "qwen3_5_moe_text")
