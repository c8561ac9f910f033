"""Dense decoders: grouped-query attention and a gated SiLU MLP, each after an RMS norm."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from slime_like.train.megatron.families.base import QKV, Family, Replicated, RowParallel, Stacked, Vocabulary, Weight


class DenseDecoder(Family):
    """Decoder with an MLP in every block, and base class of all other decoders.

    Tensors are named as in transformers' ``*ForCausalLM``, unless a subclass says otherwise.
    """

    qk_norm: bool = False  # True: a norm on every query and key head
    qkv_bias: bool = False  # True: biases on query, key and value, but not on the output projection

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("hidden_act", "silu")
        for key in ("num_attention_heads", "num_key_value_heads"):
            self.require_divisible(key)
        self.check_mlp()

    def check_mlp(self) -> None:
        """Raise ``ConfigError`` unless the tensor parallel size divides the size of the MLP.

        ``Experts`` also checks the size of the shared expert, and num_experts_per_tok.
        """
        self.require_divisible("intermediate_size")

    @property
    def mlp_size(self) -> int:
        """Intermediate size of the MLP or, if every block has experts, of a routed expert."""
        return int(self.hf.intermediate_size)

    def blocks(self) -> tuple[str, ...]:
        return ("*-",) * int(self.hf.num_hidden_layers)

    def transformer_fields(self) -> dict[str, Any]:
        hf = self.hf
        return {
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.mlp_size,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.rms_norm_eps,
            "qk_layernorm": self.qk_norm,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def weights(self) -> dict[str, Weight]:
        hf = self.hf
        vocabulary = (hf.vocab_size, hf.hidden_size)
        embedding = Vocabulary((f"{self.root}.embed_tokens.weight",), (vocabulary,), self.padded_vocabulary)
        out: dict[str, Weight] = {"embedding.word_embeddings.weight": embedding}
        for i in range(hf.num_hidden_layers):
            prefix = f"{self.root}.layers.{i}"
            parts = {**self.mixer(i, prefix), **self.mlp(i, prefix)}
            out |= {f"blocks.{i}.{key}": weight for key, weight in parts.items()}
        out["final_norm.weight"] = _norm(f"{self.root}.norm.weight", hf.hidden_size)
        head = Vocabulary(("lm_head.weight",), (vocabulary,), self.padded_vocabulary)
        out["output_layer.weight"] = embedding if hf.tie_word_embeddings else head
        return out

    @property
    def root(self) -> str:
        """Name prefix of the decoder's tensors."""
        return "model"

    def mixer(self, block: int, prefix: str) -> dict[str, Weight]:
        """Return the weights of a block's token mixer, with its norms, by parameter key within the block."""
        return self.attention(prefix)

    def attention(self, prefix: str) -> dict[str, Weight]:
        """Return the weights of a block's attention, with its norms, by parameter key within the block."""
        hidden, groups = self.hf.hidden_size, self.hf.num_key_value_heads
        q, kv = self.hf.num_attention_heads * self.head_dim, groups * self.head_dim
        attention = f"{prefix}.self_attn"
        weights = tuple(f"{attention}.{name}_proj.weight" for name in "qkv")
        biases = tuple(f"{attention}.{name}_proj.bias" for name in "qkv")
        out: dict[str, Weight] = {
            "input_layernorm.weight": _norm(f"{prefix}.input_layernorm.weight", hidden),
            "self_attention.linear_qkv.weight": QKV(weights, ((q, hidden), (kv, hidden), (kv, hidden)), groups),
            "self_attention.linear_proj.weight": RowParallel((f"{attention}.o_proj.weight",), ((hidden, q),)),
        }
        if self.qkv_bias:
            out["self_attention.linear_qkv.bias"] = QKV(biases, ((q,), (kv,), (kv,)), groups)
        if self.qk_norm:
            for name in "qk":
                out[f"self_attention.{name}_layernorm.weight"] = _norm(f"{attention}.{name}_norm.weight", self.head_dim)
        return out

    def mlp(self, block: int, prefix: str) -> dict[str, Weight]:
        """Return the weights of a block's MLP or experts, with their norms, by parameter key within the block."""
        hidden, ffn, mlp = self.hf.hidden_size, self.mlp_size, f"{prefix}.mlp"
        gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        return {
            "pre_mlp_layernorm.weight": _norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            "mlp.linear_fc1.weight": Stacked(gate_up, ((ffn, hidden),) * 2),
            "mlp.linear_fc2.weight": RowParallel((f"{mlp}.down_proj.weight",), ((hidden, ffn),)),
        }


def _norm(name: str, size: int) -> Weight:
    return Replicated((name,), ((size,),))
