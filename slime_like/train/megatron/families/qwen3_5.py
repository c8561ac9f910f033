"""Qwen3.5: Gated DeltaNet and gated attention, with an MLP or experts. A vision model's visual part is not trained."""

from __future__ import annotations

from slime_like.train.megatron.families.base import Weight
from slime_like.train.megatron.families.experts import Experts
from slime_like.train.megatron.families.hybrid import HybridDecoder
from slime_like.train.megatron.families.sections import Sections


class Qwen35(HybridDecoder):
    """Family with the tensor names of transformers' ``Qwen3_5ForCausalLM`` or ``Qwen3_5ForConditionalGeneration``.

    A text token has the same position on all three axes (time, height, width), so the multimodal rotary embedding (mrope)
    equals the plain one.
    """

    def in_proj(self, net: str) -> Weight:
        hidden, heads = self.hf.hidden_size, self.hf.linear_num_value_heads
        key, value = self.channels
        names = tuple(f"{net}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        shapes = tuple((rows, hidden) for rows in (2 * key + value, value, heads, heads))
        return Sections(names, shapes, (key, key, value, value, heads, heads))


class Qwen35Moe(Experts, Qwen35):
    """Family with the tensor names of transformers' ``Qwen3_5MoeForCausalLM`` or ``Qwen3_5MoeForConditionalGeneration``."""
