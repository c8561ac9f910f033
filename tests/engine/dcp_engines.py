"""Engines of random models with and without decode context parallelism (DCP), and reference responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_like.interfaces import Completion
from slime_like.types import F32, I32
from tests.engine import hybrid_models, test_families
from tests.engine.conftest import Models, RunningEngine, make_sampling, prompt

ROWS = 256  # rows of each rank's pool
PROMPTS = [prompt(length, seed=length) for length in (1, 2, 3, 40, 200)]
TOKENS = 6  # decode steps store five of them, at least one on each of four ranks
SAME = 1e-5  # largest difference of log-probabilities
STATES = 64  # tokens between the states that SGLang's prefix cache keeps for hybrid models


@dataclass(frozen=True)
class ModelCase:
    """Shape of a random model."""

    family: str
    kv_heads: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


TWELVE = {"num_attention_heads": 12, "intermediate_size": 96, "vocab_size": 576}  # divisible by three and four ranks
EXPERTS = {**TWELVE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
ALTERNATING = {
    "linear_num_key_heads": 12,
    "linear_num_value_heads": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,  # the name that SGLang reads
}
MODELS = {
    "qwen3": ModelCase("qwen3", fields=TWELVE),
    "qwen3_moe": ModelCase("qwen3_moe", fields=EXPERTS),
    "qwen3_next": ModelCase("qwen3_next", fields={**EXPERTS, **ALTERNATING}),
    "qwen2": ModelCase("qwen2", kv_heads=2),  # with biases
    "llama": ModelCase("llama"),
    "qwen3_5_text": ModelCase("qwen3_5_text", kv_heads=2, fields={"linear_num_key_heads": 4}),
}
HYBRIDS = ("qwen3_next", "qwen3_5_text")


def build(folder: Path, case: ModelCase) -> Models:
    """Return random models A and B, with norms, decays and biases changed from their initial values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.family in HYBRIDS:
        fields = {**hybrid_models.SHAPE, **hybrid_models.FAMILIES[case.family]}
    else:
        shape = {**test_families.SHAPE, "head_dim": 16, "tie_word_embeddings": False}
        fields = {**test_families.FAMILIES.get(case.family, {}), **shape}
    fields |= {"num_key_value_heads": case.kv_heads, **case.fields}
    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        hf[name] = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **fields)).eval()
        with torch.no_grad():
            for parameter in hf[name].parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        hf[name].save_pretrained(folder / name)
    return hybrid_models.HybridModels({name: folder / name for name in hf}, hf)


@dataclass(frozen=True)
class EngineCase:
    """An engine of a model."""

    model: str
    tp: int = 2
    dcp: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def hits(self) -> list[int]:
        """Return how many tokens (full pages) a repeated request of each prompt reads from the prefix cache."""
        page = lcm(self.dcp, STATES) if self.model in HYBRIDS else self.dcp
        return [(len(ids) - 1) // page * page for ids in PROMPTS]


A2A = {"dcp_comm": "a2a"}
REPLICATED = {**A2A, "dcp_replicate_q": True}
TORCH = {"cpu_kernels": "torch"}
SMALL = {"max_total_tokens": ROWS, "chunked_prefill_size": 64}
CASES = {
    "qwen3 tp2 dcp2": EngineCase("qwen3", 2, 2, SMALL),
    "qwen3 tp4 dcp2": EngineCase("qwen3", 4, 2, A2A),
    "qwen3 tp4 dcp4": EngineCase("qwen3", 4, 4, A2A),
    "qwen3 tp3 dcp3": EngineCase("qwen3", 3, 3, REPLICATED | TORCH),
    "qwen3_moe tp2 dcp2": EngineCase("qwen3_moe", 2, 2, REPLICATED),
    "qwen3_moe tp4 dcp2": EngineCase("qwen3_moe", 4, 2, A2A | TORCH),
    "qwen3_moe tp4 dcp4": EngineCase("qwen3_moe", 4, 4),
    "qwen3_moe tp3 dcp3": EngineCase("qwen3_moe", 3, 3, A2A),
    "qwen3_next tp2 dcp2": EngineCase("qwen3_next", 2, 2, {**A2A, "mamba_track_interval": STATES}),
    "qwen3_next tp4 dcp2": EngineCase("qwen3_next", 4, 2, {"chunked_prefill_size": 96}),
    "qwen3_next tp4 dcp4": EngineCase("qwen3_next", 4, 4, A2A),
    "qwen3_next tp3 dcp3": EngineCase("qwen3_next", 3, 3),
    "qwen2 tp4 dcp2": EngineCase("qwen2", 4, 2, REPLICATED),
    "llama by cache": EngineCase("llama", 2, 2, {"max_total_tokens": ROWS, "max_running_requests": None}),
    "qwen3_5_text tp4 dcp2": EngineCase("qwen3_5_text", 4, 2),
    "qwen3_moe dp2 tp4 dcp2": EngineCase("qwen3_moe", 4, 2, {"dp_attention": 2}),
}
UNSHARDED = {model: EngineCase(model, 1 + (case.kv_heads == 1), 1) for model, case in MODELS.items()}
"""Engines without DCP, by the name of their model."""


def greedy(engine: RunningEngine, prompts: list[I32], tokens: int = TOKENS) -> list[Completion]:
    """Return greedy responses to prompts that are sent together."""

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.client.generate(ids, [0], make_sampling(0.0, tokens)) for ids in prompts))

    return [completion for (completion,) in engine.run(all_of_them())]


def samples(engine: RunningEngine) -> list[Completion]:
    """Return three sampled responses to the last prompt."""
    return engine.run(engine.client.generate(PROMPTS[-1], [1, 2, 3], make_sampling(0.8, TOKENS)))


def assert_same(actual: list[Completion], expected: list[Completion]) -> None:
    """Assert that tokens are equal and log-probabilities agree."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=SAME)


@dataclass(frozen=True)
class ReferenceResponses:
    """Responses of an engine without DCP. transformers gives its greedy tokens the highest probability."""

    greedy: Mapping[str, list[Completion]]  # by the name of the weights
    exact: Mapping[str, list[F32]]  # log-probabilities of these tokens, by transformers
    samples: list[Completion]  # under the weights of A
    scores: F32  # log-probabilities of the last prompt's tokens under the weights of A, by transformers

    def check(self, completions: list[Completion], weights: str) -> None:
        """Assert that greedy responses equal those of the engine without DCP and agree with transformers."""
        assert_same(completions, self.greedy[weights])
        for completion, expected in zip(completions, self.exact[weights], strict=True):
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=SAME)


def reference(engine: RunningEngine, models: Models) -> ReferenceResponses:
    """Return the responses of ``engine``, which serves the weights of A before and after."""
    responses: dict[str, list[Completion]] = {}
    for version, weights in enumerate("AB"):
        if version:
            engine.run(engine.push(models.tensors(weights), version))
        responses[weights] = greedy(engine, PROMPTS)
    engine.run(engine.push(models.tensors("A"), 2))
    exact = {weights: list(exact_logprobs(responses[weights], models, weights)) for weights in responses}
    return ReferenceResponses(responses, exact, samples(engine), models.logprobs("A", PROMPTS[-1], 1.0))


def exact_logprobs(completions: list[Completion], models: Models, weights: str) -> Iterator[F32]:
    """Yield transformers' logprobs of greedy responses to ``PROMPTS``; assert that it has the same greedy tokens."""
    for ids, completion in zip(PROMPTS, completions, strict=True):
        sequence = torch.from_numpy(np.concatenate([ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits_RV = models.hf[weights](sequence[None]).logits[0, len(ids) - 1 : -1]
        logprobs_R, tokens_R = torch.log_softmax(logits_RV, -1).max(-1)
        np.testing.assert_array_equal(completion.token_ids, tokens_R.numpy())
        yield logprobs_R.numpy()
