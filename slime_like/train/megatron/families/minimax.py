"""MiniMax-M2: one norm over all query heads and one over all key heads, experts in every block, partial rotary embedding."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.base import Replicated, Stacked, Weight
from slime_like.train.megatron.families.dense import DenseDecoder
from slime_like.train.megatron.families.experts import Experts


class MinimaxM2(Experts, DenseDecoder):
    """Family with the tensor names of MiniMax's releases, as transformers' ``MiniMaxM2ForCausalLM`` saves them.

    Experts are chosen by sigmoid scores plus a bias per expert. Their outputs are weighted by the scores alone,
    normalised over the chosen experts.
    """

    projection_norms = True
    expert_block = "block_sparse_moe"
    gate_up_names = ("w1", "w3")
    down_name = "w2"

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("use_qk_norm", True)
        self.require("qk_norm_type", "per_layer")
        self.require("use_routing_bias", True)
        self.require("scoring_func", "sigmoid")
        self.require("shared_intermediate_size", 0)
        if linear := [kind for kind in getattr(hf, "attn_type_list", None) or () if kind != 1]:
            self.refuse(f"attn_type_list with {linear[0]!r}", "1 (full attention)")
        first, extra = int(hf.num_hidden_layers), int(getattr(hf, "num_mtp_modules", None) or 0)
        self.untrained_prefixes = tuple(f"model.layers.{layer}." for layer in range(first, first + extra))

    @property
    def expert_size(self) -> int:
        return int(self.hf.intermediate_size)

    @property
    def renormalises(self) -> bool:
        return True

    def is_sparse(self, block: int) -> bool:
        return True

    def router_fields(self) -> dict[str, Any]:
        return {
            **super().router_fields(),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }

    def attention(self, prefix: str) -> dict[str, Weight]:
        heads = {"query": self.hf.num_attention_heads, "key": self.hf.num_key_value_heads}
        norms = {
            f"self_attention.linear_qkv.{name}_norm.weight": Stacked(
                (f"{prefix}.self_attn.{name[0]}_norm.weight",), ((count * self.head_dim,),)
            )
            for name, count in heads.items()
        }
        return {**super().attention(prefix), **norms}

    def mlp(self, block: int, prefix: str) -> dict[str, Weight]:
        name = f"{prefix}.{self.expert_block}.e_score_correction_bias"
        return {**super().mlp(block, prefix), "mlp.router.expert_bias": Replicated((name,), ((self.num_experts,),))}
