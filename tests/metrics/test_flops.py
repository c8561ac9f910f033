"""FLOPs model against counts by hand and against torch's FLOP counter on transformers models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_like.config.rules.hf import GDNShape, num_experts, sparse_layers
from slime_like.metrics.flops import DecoderShape, decoder_shape, forward_flops, gdn_token_flops, train_flops

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 10,
    "vocab_size": 100,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    experts = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    for dense in ({"decoder_sparse_step": 3}, {"mlp_only_layers": [0, 1]}, {"first_k_dense_replace": 2}):
        assert num_experts(experts | dense) == 0 and sparse_layers(experts | dense) == ()
    assert num_experts(experts | {"decoder_sparse_step": 2}) == 8
    assert sparse_layers(experts | {"decoder_sparse_step": 2}) == (1,)
    assert sparse_layers(DENSE) == ()


def test_grouped_query_attention_by_hand() -> None:
    # Per token and layer: q 8x12, k and v 8x6 each, o 12x8: 8*(12+6+6+12) = 288 multiply-adds; MLP 3*8*10 = 240.
    # Sequences of 3 and 1: 4 tokens; 6 + 1 = 7 pairs of 12 multiply-adds for scores and 12 for values.
    by_hand = 2 * (2 * (4 * (288 + 240) + 7 * 24) + 4 * 8 * 100)
    assert by_hand == 15520
    assert forward_flops(decoder_shape(DENSE), [3, 1]) == by_hand
    assert train_flops(decoder_shape(DENSE), [3, 1]) == 3 * by_hand
    assert forward_flops(decoder_shape(DENSE), [3, 1], logits=False) == by_hand - 6400


def test_gated_deltanet_by_hand() -> None:
    config = DENSE | GDN | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    shape = decoder_shape(config)
    assert (shape.gdn_layers, shape.attention_layers) == (1, 1)
    # Keys are 10 wide, values 24. In: q and k 20, v and z 48, beta and alpha 8: 76 columns of 8. Out: 24 columns of 8.
    # Together 800 multiply-adds.
    # Convolution: 44 channels of 4. State: 3 products of 4 heads of 5x6.
    assert gdn_token_flops(shape) == 2 * 800 + 2 * 44 * 4 + 2 * 3 * 4 * 30 == 2672
    # The gate of attention: 8x12 more per token.
    attention = 2 * (4 * (288 + 96) + 7 * 24)
    assert forward_flops(shape, [3, 1]) == 4 * 2672 + attention + 2 * 2 * 4 * 240 + 6400


def test_active_experts_by_hand() -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    shape = decoder_shape(DENSE | experts | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 7})
    assert (shape.dense_layers, shape.expert_layers) == (1, 1)
    # Router 8x16, two of sixteen experts of 3*8*5, the shared one of 3*8*7 and its gate of 8.
    layer = 2 * (128 + 2 * 120 + 168 + 8)
    renamed_fields = {("num_local_experts" if key == "num_experts" else key): value for key, value in experts.items()}
    assert decoder_shape(DENSE | renamed_fields) == decoder_shape(DENSE | experts)  # as transformers saves Qwen3-MoE
    dense = forward_flops(decoder_shape(DENSE), [4])
    assert forward_flops(shape, [4]) == dense - 4 * 480 + 4 * layer
    larger = decoder_shape(DENSE | experts | {"num_experts": 32, "decoder_sparse_step": 2})
    assert (larger.dense_layers, larger.expert_layers) == (1, 1)
    assert forward_flops(larger, [4]) == dense - 4 * 480 + 4 * 2 * (256 + 240)


def test_latent_attention_by_hand() -> None:
    latent = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    shape = decoder_shape(DENSE | latent | {"model_type": "deepseek_v3"})
    # q 8x5 and 5x20, latent of k and v 8x8, k and v 6x28, o 16x8: 40 + 100 + 64 + 168 + 128 = 500 multiply-adds.
    # A pair: 4 heads of 5 multiply-adds for the score and 4 for the value.
    assert forward_flops(shape, [3, 1]) == 2 * (2 * (4 * (500 + 240) + 7 * 36) + 4 * 8 * 100)
    direct = decoder_shape(DENSE | latent | {"q_lora_rank": None})
    assert forward_flops(shape, [1]) - forward_flops(direct, [1]) == 2 * 2 * (140 - 8 * 20)
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 2}
    sparse = decoder_shape(DENSE | latent | experts | {"first_k_dense_replace": 1})
    assert (sparse.dense_layers, sparse.expert_layers) == (1, 1)
    # Router 8x16, two of sixteen experts and two shared ones of 3*8*5, without a gate.
    assert forward_flops(sparse, [1]) - forward_flops(shape, [1]) == 2 * (128 + 4 * 120 - 240)


def test_published_shapes() -> None:
    """Qwen3-Next 80B, with 3B active parameters, needs about 2 FLOPs per active parameter and token."""
    next_80b = DecoderShape(
        hidden=2048,
        vocab=151936,
        attention_layers=12,
        gdn_layers=36,
        heads=16,
        kv_heads=2,
        head_dim=256,
        output_gate=True,
        gdn=GDNShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4),
        dense_layers=0,
        mlp=5120,
        expert_layers=48,
        experts=512,
        active_experts=10,
        expert_mlp=512,
        shared_mlp=512,
        shared_gate=True,
    )
    per_token = forward_flops(next_80b, [1])
    assert 2 * 3.0e9 < per_token < 2 * 4.0e9
    config = {"model_type": "qwen3_next", **{k: v for k, v in DENSE.items() if k != "model_type"}, **GDN}
    assert decoder_shape(config | {"num_hidden_layers": 48}).gdn_layers == 36
    assert decoder_shape({"text_config": config}).output_gate


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_torch_counts_the_same(kind: str) -> None:
    """The FLOPs of the projections agree with those that torch counts for a transformers model on one token.

    The FLOPs of attention pairs, states and convolutions are subtracted first.
    """
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

    values: dict[str, Any] = {**DENSE, "num_hidden_layers": 4, "head_dim": 4, "max_position_embeddings": 64}
    if kind == "hybrid":
        values |= {**GDN, "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    config_class = Qwen3_5TextConfig if kind == "hybrid" else Qwen3Config
    model = AutoModelForCausalLM.from_config(config_class(**values))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.int64), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    linear = sum(count for op, count in counts.items() if "addmm" in str(op) or str(op) == "aten.mm")
    shape = decoder_shape(values)
    expected = forward_flops(shape, [1]) - shape.attention_layers * 4 * shape.heads * shape.head_dim
    if shape.gdn is not None:
        state = 6 * shape.gdn.value_heads * shape.gdn.key_dim * shape.gdn.value_dim
        expected -= shape.gdn_layers * (state + 2 * shape.gdn.conv_width * 44)
    assert linear == expected
