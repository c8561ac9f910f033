"""Qwen3, dense: grouped-query attention with a norm on every query and key head, gated SiLU MLP."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from slime_like.train.megatron.families.base import QKV, Family, Replicated, Row, Stacked, Vocabulary, Weight


class Qwen3(Family):
    """Names as in transformers' ``Qwen3ForCausalLM``."""

    model_types = ("qwen3",)

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("hidden_act", "silu")
        self.require("attention_bias", False)
        self.require("use_sliding_window", False)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            self.require_divisible(key)

    def blocks(self) -> tuple[str, ...]:
        return ("*-",) * int(self.hf.num_hidden_layers)

    def transformer_fields(self) -> dict[str, Any]:
        hf = self.hf
        return {
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.head_dim,
            "ffn_hidden_size": hf.intermediate_size,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.rms_norm_eps,
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def weights(self) -> dict[str, Weight]:
        hf = self.hf
        vocabulary = (hf.vocab_size, hf.hidden_size)
        embedding = Vocabulary(("model.embed_tokens.weight",), (vocabulary,), self.padded_vocabulary)
        out: dict[str, Weight] = {"embedding.word_embeddings.weight": embedding}
        for i in range(hf.num_hidden_layers):
            out |= {f"blocks.{i}.{key}": weight for key, weight in self._block(f"model.layers.{i}").items()}
        out["final_norm.weight"] = self._norm("model.norm.weight", hf.hidden_size)
        head = Vocabulary(("lm_head.weight",), (vocabulary,), self.padded_vocabulary)
        out["output_layer.weight"] = embedding if hf.tie_word_embeddings else head
        return out

    def _block(self, prefix: str) -> dict[str, Weight]:
        hf = self.hf
        hidden, ffn = hf.hidden_size, hf.intermediate_size
        q, kv = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = tuple(f"{attention}.{name}_proj.weight" for name in "qkv")
        return {
            "input_layernorm.weight": self._norm(f"{prefix}.input_layernorm.weight", hidden),
            "self_attention.linear_qkv.weight": QKV(
                qkv, ((q, hidden), (kv, hidden), (kv, hidden)), hf.num_key_value_heads
            ),
            "self_attention.q_layernorm.weight": self._norm(f"{attention}.q_norm.weight", hf.head_dim),
            "self_attention.k_layernorm.weight": self._norm(f"{attention}.k_norm.weight", hf.head_dim),
            "self_attention.linear_proj.weight": Row((f"{attention}.o_proj.weight",), ((hidden, q),)),
            "pre_mlp_layernorm.weight": self._norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            "mlp.linear_fc1.weight": Stacked(
                (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), ((ffn, hidden),) * 2
            ),
            "mlp.linear_fc2.weight": Row((f"{mlp}.down_proj.weight",), ((hidden, ffn),)),
        }

    @staticmethod
    def _norm(name: str, size: int) -> Weight:
        return Replicated((name,), ((size,),))
