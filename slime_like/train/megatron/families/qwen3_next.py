"""Qwen3-Next: Gated DeltaNet and gated attention, with routed experts and a gated shared expert."""

from __future__ import annotations

from slime_like.train.megatron.families.base import Weight
from slime_like.train.megatron.families.experts import Experts
from slime_like.train.megatron.families.hybrid import HybridDecoder
from slime_like.train.megatron.families.sections import InterleavedByHead


class Qwen3Next(Experts, HybridDecoder):
    """Family with the tensor names of transformers' ``Qwen3NextForCausalLM``."""

    def in_proj(self, net: str) -> Weight:
        hf = self.hf
        num_heads, values_per_key = hf.linear_num_key_heads, hf.linear_num_value_heads // hf.linear_num_key_heads
        key, value = self.channels
        of_head = (hf.linear_key_head_dim, hf.linear_key_head_dim, *(values_per_key * hf.linear_value_head_dim,) * 2)
        names = (f"{net}.in_proj_qkvz.weight", f"{net}.in_proj_ba.weight")
        shapes = ((2 * key + 2 * value, hf.hidden_size), (2 * hf.linear_num_value_heads, hf.hidden_size))
        return InterleavedByHead(names, shapes, num_heads, (of_head, (values_per_key, values_per_key)))
