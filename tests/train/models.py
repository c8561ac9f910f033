"""Tiny checkpoints and ragged rows for trainer tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import AlgoConfig, GrpoConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.resolved import Layout, RankSpec

VOCAB = 250  # so that the vocabulary is padded


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    # Most test sequences are longer than the original range. mscale and mscale_all_dim differ, so that cosines and sines
    # are scaled.
    "yarn": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}
# Different for each family and from every default of a library, so that a test detects a constant in their place.
THETA = {
    "qwen2": 3e5,
    "qwen3": 2e5,
    "llama": 5e5,
    "qwen3_moe": 2e6,
    "qwen3_next": 4e6,
    "qwen3_5_text": 1e7,
    "qwen3_5_moe_text": 6e6,
    "deepseek_v2": 7e5,
    "deepseek_v3": 8e5,
    "glm4": 9e5,
    "glm4_moe": 3e6,
    "minimax_m2": 1.1e6,
}
EPSILON = {
    "qwen2": 3e-5,
    "qwen3": 2e-5,
    "llama": 5e-5,
    "qwen3_moe": 4e-5,
    "qwen3_next": 6e-5,
    "qwen3_5_text": 1e-4,
    "qwen3_5_moe_text": 8e-5,
    "deepseek_v2": 7e-5,
    "deepseek_v3": 9e-5,
    "glm4": 2.5e-5,
    "glm4_moe": 3.5e-5,
    "minimax_m2": 4.5e-5,
}


HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRIDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
NUM_BLOCKS, NUM_EXPERTS = 4, 8
EXPERTS: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 32}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT: dict[str, Any] = {
    **GROUPED,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_shared_experts": 1},
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "glm4_moe": {**GROUPED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    "minimax_m2": {"head_dim": 16, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "num_mtp_modules": 1},
    "qwen3": {"head_dim": 16},
    "qwen3_5_text": HYBRID,
    "qwen3_next": {**HYBRID, "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_moe": {"head_dim": 16, **EXPERTS, "norm_topk_prob": True},
    "qwen3_5_moe_text": {**HYBRID, **SHARED},
}


def make_qwen3(folder: Path, *, tied: bool, layers: int = NUM_BLOCKS, hidden: int = 64, seed: int = 0) -> Path:
    """Write a random Qwen3 and return its folder."""
    return make_model(folder, "qwen3", tied=tied, layers=layers, hidden=hidden, seed=seed)


def make_model(
    folder: Path,
    family: str,
    *,
    tied: bool,
    layers: int = NUM_BLOCKS,
    hidden: int = 64,
    seed: int = 0,
    rope: str = "default",
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a random model with 4 query heads, 2 key-value heads, random norms and biases, and return its folder.

    ``changes`` replace keys of the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        rms_norm_eps=EPSILON[family],
        rope_parameters={
            **ROPE[rope],
            "rope_theta": THETA[family],
            **({"partial_rotary_factor": 0.5} if family in (*HYBRIDS, "glm4", "glm4_moe", "minimax_m2") else {}),
        },
        **{"num_key_value_heads": 2, **EXTRA.get(family, {}), **(changes or {})},
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    randomise_constants(model)
    model.save_pretrained(folder)
    return folder


def randomise_constants(model: Any) -> None:
    """Randomise parameters that are initialised to constants, so that a test detects a mistake with them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))  # so that two norms differ
            elif name.endswith("A_log"):
                pass  # already random
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))  # initialised to 0
            else:
                parameter.mul_(2.0)  # so that logits are far from uniform
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.02 * torch.randn_like(buffer))  # so that it changes the choice of experts and of groups


def make_vision(folder: Path, seed: int, *, experts: bool = False) -> Path:
    """Write a random tied Qwen3.5 with a vision tower and tensors for multi-token prediction.

    With ``experts``, a block's experts are fused in two tensors, as in released models.
    """
    import transformers

    kind, family = ("Qwen3_5Moe", "qwen3_5_moe_text") if experts else ("Qwen3_5", "qwen3_5_text")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**shape, **HYBRID, "vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 512}
    rope = {**ROPE["default"], "rope_theta": THETA[family], "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text |= {"rope_parameters": rope, "rms_norm_eps": EPSILON[family], "tie_word_embeddings": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**text, **(SHARED if experts else {})},
        vision_config={**vision, "num_position_embeddings": 16},
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomise_constants(model)
    model.save_pretrained(folder)
    rewrite(folder, fuse_experts)
    return add_mtp(folder)


def add_mtp(folder: Path) -> Path:
    """Add tensors for multi-token prediction to the model in ``folder``: bfloat16, some of them of experts."""
    names = ("fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight")
    names += tuple(f"layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up", "down"))
    more = {f"mtp.{name}": torch.randn(4, 6, dtype=torch.bfloat16) for name in names}
    rewrite(folder, lambda tensors: tensors | more)
    return folder


def add_mtp_layer(folder: Path) -> Path:
    """Add a layer for multi-token prediction to the model in ``folder``, numbered after its decoder's layers."""
    return _add_layer(folder, "model.layers.4.")


def _add_layer(folder: Path, prefix: str) -> Path:
    names = ("enorm.weight", "eh_proj.weight", "self_attn.q_a_proj.weight", "shared_head.norm.weight")
    more = {f"{prefix}{name}": torch.randn(4, 6, dtype=torch.bfloat16) for name in names}
    rewrite(folder, lambda tensors: tensors | more)
    return folder


def rename_to_kimi(folder: Path) -> Path:
    """Give the model in ``folder`` the model_type of Kimi K2, which transformers has no class for."""
    return _edit_config(folder, {"model_type": "kimi_k2"})


def rename_to_mimo(folder: Path) -> Path:
    """Make the Qwen2 in ``folder`` a MiMo, which transformers has no class for, with a multi-token prediction layer."""
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _add_layer(_edit_config(folder, own), "model.mtp_layers.0.")


def add_code(folder: Path) -> Path:
    """Add code that must not run to ``folder``. DeepSeek-V3, Kimi K2, MiniMax-M2 and MiMo are released with code."""
    (folder / "own.py").write_text("raise AssertionError('code of a model folder runs')")
    return _edit_config(folder, {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})


def _edit_config(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors in ``folder`` by the result of ``change``."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with the experts of each block in two tensors over all experts."""
    out: dict[str, Tensor] = {}
    matrices_of: dict[str, dict[str, list[Tensor]]] = {}
    names = [name for name in tensors if ".mlp.experts." in name]
    for name in sorted(names, key=lambda name: int(name.partition(".mlp.experts.")[2].partition(".")[0])):
        block, _, suffix = name.partition(".mlp.experts.")
        matrices_of.setdefault(f"{block}.mlp.experts", {}).setdefault(suffix.split(".")[1], []).append(tensors[name])
    for prefix, parts in matrices_of.items():
        gate, up, down = (torch.stack(parts[f"{part}_proj"]) for part in ("gate", "up", "down"))
        out |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return {name: tensor for name, tensor in tensors.items() if name not in names} | out


def make_spec(folder: Path, layout: Layout, **changes: Any) -> RankSpec:
    """Return a RankSpec. Keyword arguments replace its fields; ``model`` and ``optim`` are dicts of config keys."""
    model_keys: dict[str, Any] = {"logits_chunk": 16, **changes.pop("model", {})}
    optim_keys: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, **changes.pop("optim", {})}
    model = ModelConfig(hf_checkpoint=str(folder), **model_keys)
    optim = OptimConfig(**optim_keys)
    algo: AlgoConfig = changes.pop("algo", None) or GrpoConfig()
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "temperature": 0.7,
        "num_steps": 10,
        "steps_per_rollout": 1,
        "max_tokens_per_rank": 256,
        "seed": 1,
        "deadline_s": 60.0,
    }
    return RankSpec(model=model, optim=optim, algo=algo, layout=layout, **{**fields, **changes})


def make_rows(lengths: Sequence[int], seed: int, *, version: int = 0) -> PackedBatch:
    """Return random sequences whose first third is the prompt, with uneven loss weights that are not normalised."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    trained_T = np.zeros(total, dtype=bool)
    for start, stop in itertools.pairwise(bounds):
        trained_T[start + max(1, (stop - start) // 3) : stop] = True
    weight = np.where(trained_T, rng.uniform(0.5, 1.5, total), 0).astype(np.float32)
    return PackedBatch(
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        cu_seqlens=bounds,
        loss_weight=weight,
        versions=np.where(trained_T, version, -1).astype(np.int32),
        rollout_logprobs=np.where(trained_T, rng.uniform(-7, -4, total), 0).astype(np.float32),
        rewards=rng.normal(size=len(lengths)).astype(np.float32),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
    )


def join_rows(first: PackedBatch, second: PackedBatch) -> PackedBatch:
    """Return two micro-batches joined into one."""
    assert first.advantages is not None and second.advantages is not None
    join = lambda name: np.concatenate([getattr(first, name), getattr(second, name)])  # noqa: E731
    bounds = np.concatenate([first.cu_seqlens, first.cu_seqlens[-1] + second.cu_seqlens[1:]]).astype(np.int32)
    names = ("token_ids", "loss_weight", "versions", "rollout_logprobs", "rewards", "advantages", "sample_ids")
    columns: dict[str, Any] = {name: join(name) for name in names}
    extras = {name: np.concatenate([column, second.extras[name]]) for name, column in first.extras.items()}
    return PackedBatch(cu_seqlens=bounds, extras=extras, **columns)


def normalise(micro_batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return the rows with loss weights that sum to 1 over all rows."""
    import dataclasses

    total = np.float32(sum(float(r.loss_weight.sum()) for r in micro_batches))
    return [dataclasses.replace(r, loss_weight=r.loss_weight / total) for r in micro_batches]


def shard(micro_batches: Sequence[PackedBatch], dp: int) -> list[list[PackedBatch]]:
    """Return micro-batches distributed to dp ranks in turn."""
    return [list(micro_batches[rank::dp]) for rank in range(dp)]


def count_tokens(micro_batches: Sequence[PackedBatch]) -> int:
    """Return the number of trained tokens."""
    return sum(int((r.loss_weight > 0).sum()) for r in micro_batches)
