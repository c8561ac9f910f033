"""Models with latent attention (DeepSeek, Kimi K2): folders that are read, and one message for each layout that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import CheckpointError
from tests.config.bad_input import refusal
from tests.config.model_folder import SHAPE, write_model, write_safetensors

MACHINE = Machine(0, 8, 64 * 2**30, ())
YARN = {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}  # as in released models
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN,
}


def load(argv: list[str], folder: Path, *extra: str) -> Any:
    other_arguments = [arg for arg in argv if not arg.startswith("model.hf_checkpoint=")]
    return load_config([*other_arguments, f"model.hf_checkpoint={folder}", *extra], files=True)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_engines_on_a_cpu_are_planned(model_type: str, argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **LATENT | {"model_type": model_type})
    plan = make_plan(load(argv, folder, "rollout.tp=2"), MACHINE)
    assert plan.device == "cpu" and plan.needs_engines
    assert plan.engines[0].dcp == 1


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_a_rotary_scaling_that_engines_read_as_another_is_refused(kind: str, argv: list[str], tmp_path: Path) -> None:
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = write_model(tmp_path / "model", **LATENT | {"rope_scaling": {"rope_type": kind, **numbers}})
    with refusal([f"rope_scaling.rope_type='{kind}'", "SGLang reads as yarn", "algo=sft"], CheckpointError):
        load(argv, folder)
    load(argv, folder, "algo=sft", "rollout.n_samples_per_prompt=1")


@pytest.mark.parametrize(
    ("changes", "kind"), [({}, "experts"), ({"first_k_dense_replace": 4, "moe_layer_freq": 1}, "latent attention")]
)
def test_tensor_parallel_ranks_must_shard_the_tokens(
    changes: dict[str, int], kind: str, argv: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **LATENT | changes)
    with refusal(["parallel.tp=2", f"a model with {kind}", "set parallel.sequence_parallel=true"]):
        load(argv, folder, "parallel.tp=2", "parallel.sequence_parallel=false")


def test_heads_and_experts_must_divide_evenly(argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **LATENT)
    with refusal(["parallel.tp=3", "8 attention heads", "1, 2, 4, 8"]):
        load(argv, folder, "parallel.tp=3")
    with refusal(["parallel.ep=3", "8 experts", "1, 2, 4, 8"]):
        load(argv, folder, "parallel.ep=3", "parallel.cp=3")


def test_yarn_is_read_only_for_families_that_support_it(argv: list[str], tmp_path: Path) -> None:
    load(argv, write_model(tmp_path / "model", **LATENT))
    with refusal(["rope_scaling.rope_type='yarn'", "supported: default, linear, llama3"], CheckpointError):
        load(argv, write_model(tmp_path / "qwen", rope_scaling=YARN))
    incomplete = {"rope_scaling": {"type": "yarn", "factor": 32}}
    with refusal(["without a number for original_max_position_embeddings"], CheckpointError):
        load(argv, write_model(tmp_path / "incomplete", **LATENT | incomplete))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("family", ["auto", "deepseek_v3"])
def test_sparse_attention_is_refused(model_type: str, family: str, argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **LATENT | {"model_type": model_type})
    with refusal([f"has model_type '{model_type}'", "sparse (DSA", "train a model with full attention"]):
        load(argv, folder, f"model.family={family}")


def test_layers_for_multi_token_prediction_follow_the_decoder(argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **LATENT)
    tensors = {f"model.layers.{layer}.input_layernorm.weight": (SHAPE["hidden_size"],) for layer in range(5)}
    write_safetensors(folder / "model.safetensors", tensors)
    load(argv, folder)
    write_model(tmp_path / "none", **LATENT | {"num_nextn_predict_layers": 0})
    write_safetensors(tmp_path / "none" / "model.safetensors", tensors)
    with refusal(["the weights have a layer 4, but config.json has num_hidden_layers 4"], CheckpointError):
        load(argv, tmp_path / "none")
