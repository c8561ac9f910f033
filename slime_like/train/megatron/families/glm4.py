"""GLM-4 (dense, with norms after attention and MLP) and GLM-4.5 (with experts): attention that rotates half of each head."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.base import Replicated, Weight
from slime_like.train.megatron.families.dense import DenseDecoder
from slime_like.train.megatron.families.grouped_experts import BiasedExperts
from slime_like.train.megatron.families.sections import Sections


class Glm4(DenseDecoder):
    """Family with the tensor names of transformers' ``Glm4ForCausalLM``.

    The rotary embedding rotates pairs of neighbouring channels.
    """

    output_norms = True

    def __init__(self, hf: Any, tp: int) -> None:
        self.qkv_bias = bool(hf.attention_bias)
        super().__init__(hf, tp)

    def transformer_fields(self) -> dict[str, Any]:
        return {**super().transformer_fields(), "rotary_interleaved": True}

    def attention(self, prefix: str) -> dict[str, Weight]:
        norm = Replicated((f"{prefix}.post_self_attn_layernorm.weight",), ((self.hf.hidden_size,),))
        return {**super().attention(prefix), "self_attention.linear_proj.output_norm.weight": norm}

    def mlp(self, block: int, prefix: str) -> dict[str, Weight]:
        hidden, ffn = self.hf.hidden_size, self.mlp_size
        return {
            **super().mlp(block, prefix),
            "mlp.linear_fc1.weight": Sections((f"{prefix}.mlp.gate_up_proj.weight",), ((2 * ffn, hidden),), (ffn, ffn)),
            "mlp.linear_fc2.output_norm.weight": Replicated((f"{prefix}.post_mlp_layernorm.weight",), ((hidden,),)),
        }


class Glm4Moe(BiasedExperts, DenseDecoder):
    """Family with the tensor names of transformers' ``Glm4MoeForCausalLM``."""

    def __init__(self, hf: Any, tp: int) -> None:
        self.qkv_bias, self.qk_norm = bool(hf.attention_bias), bool(hf.use_qk_norm)
        super().__init__(hf, tp)
