"""Engines of all dense and MoE families but dense Qwen3 agree with transformers, before and after pushes.

The trainer equals transformers to 1e-5 (tests/train/test_families.py), so trainer and engine agree. The engine of
``qwen3_moe`` starts from a checkpoint with float8 weights, which trainer and transformers multiply by their scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema import names
from slime_like.data.routing import RoutingShape
from slime_like.types import I32
from tests.engine.conftest import VOCAB, Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer
from tests.engine.hybrid_models import HybridModels
from tests.train.float8 import dequantising, quantise
from tests.train.models import EPSILON, GROUPED, THETA, add_code, rename_to_mimo
from tests.train.parity import by_expert

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4
FLOAT8 = REPLAYED = "qwen3_moe"
ROUTING = RoutingShape(num_blocks=2, experts_per_token=2, num_experts=8, sparse_blocks=(0, 1))
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
HALF_ROTATED = {"rope_type": "default", "partial_rotary_factor": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": THETA["llama"], **LLAMA3},
        "rms_norm_eps": EPSILON["llama"],
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA["qwen3_moe"]},
        "rms_norm_eps": EPSILON["qwen3_moe"],
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "glm4": {
        "rope_parameters": {**HALF_ROTATED, "rope_theta": THETA["glm4"]},
        "rms_norm_eps": EPSILON["glm4"],
        "tie_word_embeddings": False,
        "head_dim": 16,
        "pad_token_id": None,
    },
    "glm4_moe": {
        "rope_parameters": {**HALF_ROTATED, "rope_theta": THETA["glm4_moe"]},
        "rms_norm_eps": EPSILON["glm4_moe"],
        "tie_word_embeddings": False,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        **GROUPED,
    },
    "minimax_m2": {
        "rope_parameters": {**HALF_ROTATED, "rope_theta": THETA["minimax_m2"]},
        "rms_norm_eps": EPSILON["minimax_m2"],
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mimo": {
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA["qwen2"]},
        "rms_norm_eps": EPSILON["qwen2"],
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA["qwen2"]},
        "rms_norm_eps": EPSILON["qwen2"],
        "tie_word_embeddings": True,
    },
}
# Layouts of more than one rank. With dp_attention, ranks hold different sequences and share the experts.
LAYOUTS: dict[str, dict[str, Any]] = {"glm4_moe": {"tp": 2}, "minimax_m2": {"tp": 2, "dp_attention": 2}}


class Float8Models(Models):
    """Models of which A is stored in float8. As from a trainer, tensors have no scales and are per expert."""

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return by_expert(self.hf[name].state_dict())


def load_float8(folder: Path) -> Any:
    """Return transformers' float32 model of a float8 checkpoint."""
    from transformers import AutoModelForCausalLM

    with dequantising():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def build(folder: Any, family: str) -> Models:
    """Write two random models of one shape, with random biases and query and key norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        kind = names.FAMILIES[family].config_class or family
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **FAMILIES[family]))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))  # transformers initialises biases to 0
                elif parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.add_(0.3 * torch.randn_like(parameter))
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.1 * torch.randn_like(buffer))
        model.eval().save_pretrained(folder / name)
        if family == "mimo":
            rename_to_mimo(folder / name)
        if family in ("mimo", "minimax_m2"):
            add_code(folder / name)
        hf[name] = model
    if family == FLOAT8:
        return Float8Models({name: folder / name for name in hf}, hf | {"A": load_float8(quantise(folder / "A"))})
    return HybridModels({name: folder / name for name in hf}, hf)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, tuple[Models, RunningEngine]]]:
    """Return the models and engine of each family; the engines start at the same time."""
    with contextlib.ExitStack() as stack:
        launching: dict[str, tuple[Models, Any]] = {}
        for family in FAMILIES:
            folder = tmp_path_factory.mktemp(family)
            models = build(folder, family)
            routing = ROUTING if family == REPLAYED else None
            options: dict[str, Any] = {"tp": 1, "server_type": ForkedEngineServer, **LAYOUTS.get(family, {})}
            run = stack.enter_context(contextlib.closing(launch(models, folder, routing=routing, **options)))
            assert next(run) is None
            launching[family] = models, run
        yield {family: (models, next(run)) for family, (models, run) in launching.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_transformers_agree(family: str, engines: Mapping[str, tuple[Models, RunningEngine]]) -> None:
    models, engine = engines[family]
    ids = prompt(100, seed=5)
    for version, name in enumerate("ABA"):
        if version:
            engine.run(engine.push(models.tensors(name), version))
        (scores,) = engine.run(engine.client.score([ids], 1.0))
        np.testing.assert_allclose(scores, models.logprobs(name, ids, 1.0), atol=TOLERANCE)
        for completion in engine.run(engine.client.generate(ids, [1, 2, 3], make_sampling(0.8, tokens=16))):
            sequence, num_sampled = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
            np.testing.assert_allclose(
                completion.logprobs, models.logprobs(name, sequence, 0.8)[-num_sampled:], atol=TOLERANCE
            )


def test_the_engine_returns_the_experts_of_every_token(engines: Mapping[str, tuple[Models, RunningEngine]]) -> None:
    """Experts of cached, scored and continued tokens are returned, even after a push, but not for an evaluation."""
    models, engine = engines[REPLAYED]
    ids, sampling = prompt(90, seed=6), make_sampling(0.8, tokens=20)
    for version, name in ((3, "A"), (4, "B")):
        engine.run(engine.push(models.tensors(name), version))
        ((_, experts),) = engine.run(engine.client.score_with_experts([ids], 1.0))
        assert experts is not None
        np.testing.assert_array_equal(np.sort(experts), chosen_by_hf(models.hf[name], ids)[:-1])
        completions = engine.run(engine.client.generate(ids, [1, 2], sampling))
        sequences = [np.concatenate([ids, completion.token_ids]) for completion in completions]
        completions += engine.run(engine.client.extend(sequences, [1, 2], [5, 7], sampling))
        sequences += [
            np.concatenate(pair) for pair in zip(sequences, [c.token_ids for c in completions[2:]], strict=True)
        ]
        assert completions[-1].cached_tokens > len(ids)
        for completion, sequence in zip(completions, sequences, strict=True):
            assert completion.routed_experts is not None and completion.routed_experts.dtype == np.uint8
            np.testing.assert_array_equal(
                np.sort(completion.routed_experts), chosen_by_hf(models.hf[name], sequence)[:-1]
            )
    (evaluated,) = engine.run(engine.client.extend([ids], [1], [5], sampling, for_training=False))
    assert evaluated.routed_experts is None


@torch.no_grad()
def chosen_by_hf(model: Any, ids: I32) -> Any:
    """Return the sorted experts [L, layers, experts per token] that the routers of transformers choose."""
    expert_ids: list[Any] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda gate, inputs, outputs: expert_ids.append(outputs[2])) for gate in gates]
    model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(expert_ids, 1).numpy())
