"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1).

Keys and values are low-rank, and so are queries unless q_lora_rank is None.
"""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.base import Replicated, RowParallel, Stacked, Weight
from slime_like.train.megatron.families.dense import DenseDecoder


class LatentDecoder(DenseDecoder):
    """Decoder with latent attention. Tensors are named as in transformers' ``DeepseekV3Attention``.

    Down projections are replicated over tensor parallel ranks; attention's other projections are split by head.
    """

    shape_keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("attention_bias", False)
        self.require("rope_interleave", True)
        self.require("num_key_value_heads", hf.num_attention_heads)
        self.require_divisible("kv_lora_rank + qk_rope_head_dim", self.key_value_size)
        if hf.q_lora_rank is not None:
            self.require_divisible("q_lora_rank")

    @property
    def key_value_size(self) -> int:
        """Width of the latent for keys and values, plus that of the rotated key, which all heads share."""
        return int(self.hf.kv_lora_rank + self.hf.qk_rope_head_dim)

    @property
    def query_dim(self) -> int:
        """Width of a query head."""
        return int(self.hf.qk_nope_head_dim + self.hf.qk_rope_head_dim)

    @property
    def head_dim(self) -> int:
        return int(self.hf.qk_rope_head_dim)  # the rotated part

    def blocks(self) -> tuple[str, ...]:
        return tuple(block.replace("*", "+") for block in super().blocks())

    def transformer_fields(self) -> dict[str, Any]:
        hf, rope = self.hf, self.hf.rope_parameters
        return {
            **super().transformer_fields(),
            "multi_latent_attention": True,
            "kv_channels": self.query_dim,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            # megatron scales scores by these two; ``Rotary`` computes the angles.
            "rotary_scaling_factor": rope.get("factor") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }

    def attention(self, prefix: str) -> dict[str, Weight]:
        hf, attention = self.hf, f"{prefix}.self_attn"
        hidden, heads, rank = hf.hidden_size, hf.num_attention_heads, hf.kv_lora_rank
        expanded_size = heads * (hf.qk_nope_head_dim + hf.v_head_dim)
        return {
            "input_layernorm.weight": Replicated((f"{prefix}.input_layernorm.weight",), ((hidden,),)),
            **self._queries(attention),
            "self_attention.linear_kv_down_proj.weight": Replicated(
                (f"{attention}.kv_a_proj_with_mqa.weight",), ((self.key_value_size, hidden),)
            ),
            "self_attention.kv_layernorm.weight": Replicated((f"{attention}.kv_a_layernorm.weight",), ((rank,),)),
            "self_attention.linear_kv_up_proj.weight": Stacked(
                (f"{attention}.kv_b_proj.weight",), ((expanded_size, rank),)
            ),
            "self_attention.linear_proj.weight": RowParallel(
                (f"{attention}.o_proj.weight",), ((hidden, heads * hf.v_head_dim),)
            ),
        }

    def _queries(self, attention: str) -> dict[str, Weight]:
        """Return the weights that project to queries: via a latent with a norm or, if q_lora_rank is None, directly."""
        hidden, rank, rows = self.hf.hidden_size, self.hf.q_lora_rank, self.hf.num_attention_heads * self.query_dim
        if rank is None:
            return {"self_attention.linear_q_proj.weight": Stacked((f"{attention}.q_proj.weight",), ((rows, hidden),))}
        return {
            "self_attention.linear_q_down_proj.weight": Replicated(
                (f"{attention}.q_a_proj.weight",), ((rank, hidden),)
            ),
            "self_attention.q_layernorm.weight": Replicated((f"{attention}.q_a_layernorm.weight",), ((rank,),)),
            "self_attention.linear_q_up_proj.weight": Stacked((f"{attention}.q_b_proj.weight",), ((rows, rank),)),
        }
