"""Engines of hybrid models (gated delta net and attention layers) agree with transformers on every sequence.

Prompts longer than ``CHUNK`` are prefilled in chunks. Float32 errors are larger than for dense models, because the
norms after the delta rule divide by small numbers (transformers in float32 and in float64 differ by up to 4e-5 here).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from slime_like.errors import EngineError
from slime_like.interfaces import Completion
from slime_like.types import I32
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer
from tests.engine.hybrid_models import FAMILIES, WITH_VISION, build
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4
CHUNK = 48
ENGINES = dict.fromkeys([*FAMILIES, WITH_VISION], 1) | {"qwen3_next tp2": 2, "qwen3_5_text tp2": 2}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Models]:
    return {family: build(tmp_path_factory.mktemp(family), family) for family in [*FAMILIES, WITH_VISION]}


@pytest.fixture(scope="module")
def engines(
    hybrids: Mapping[str, Models], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, tuple[Models, RunningEngine]]]:
    """Return the models and engine of each name; the engines start at the same time."""
    with contextlib.ExitStack() as stack:
        launching: dict[str, tuple[Models, Any]] = {}
        for name, tp in ENGINES.items():
            models = hybrids[name.split()[0]]
            folder = tmp_path_factory.mktemp("run")
            run = stack.enter_context(
                contextlib.closing(
                    launch(models, folder, tp, chunked_prefill_size=CHUNK, server_type=ForkedEngineServer)
                )
            )
            assert next(run) is None
            launching[name] = models, run
        yield {name: (models, next(run)) for name, (models, run) in launching.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, its prompt and its temperature."""

    ids: I32
    completion: Completion
    temperature: float


def assert_agrees(models: Models, name: str, answers: Sequence[Answer]) -> None:
    """Assert that log-probabilities agree with transformers, and that greedy tokens are the most probable ones there.

    Both hold up to rounding.
    """
    sequences = [np.concatenate([answer.ids, answer.completion.token_ids]) for answer in answers]
    for answer, logits_LV in zip(answers, all_logits(models, name, sequences), strict=True):
        tokens_R = torch.from_numpy(answer.completion.token_ids).long()
        logprobs_RV = torch.log_softmax(logits_LV[len(answer.ids) - 1 : -1] / (answer.temperature or 1.0), -1)
        expected_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.completion.logprobs, expected_R, atol=TOLERANCE)
        if answer.temperature == 0:
            np.testing.assert_allclose(expected_R, logprobs_RV.max(-1).values.numpy(), atol=TOLERANCE)


def all_logits(models: Models, name: str, sequences: Sequence[I32]) -> list[torch.Tensor]:
    """Return the logits [L, V] of each sequence, from one padded forward pass of transformers. Layers are causal."""
    ids = pad_sequence([torch.from_numpy(sequence.astype(np.int64)) for sequence in sequences], batch_first=True)
    with torch.no_grad():
        logits = models.hf[name](ids).logits
    return [logits[row, : len(sequence)] for row, sequence in enumerate(sequences)]


@pytest.mark.parametrize("name_of_engine", ENGINES)
def test_a_batch_of_many_lengths_agrees_before_and_after_pushes(
    name_of_engine: str, engines: Mapping[str, tuple[Models, RunningEngine]]
) -> None:
    """Greedy and sampled responses, two per prompt, to prompts of 1 to 100 tokens that may be prefixes of others."""
    models, engine = engines[name_of_engine]
    long_prompt = prompt(100, seed=5)
    prompts = [long_prompt, long_prompt[:60], prompt(1, seed=6), prompt(17, seed=7), long_prompt[:31]]
    for version, name in enumerate("ABA"):
        if version:
            engine.run(engine.push(models.tensors(name), version))

        async def answers() -> list[list[Completion]]:
            requests = [
                engine.client.generate(ids, [index, 50], make_sampling([0.0, 0.8][index % 2], 8 + 3 * index))
                for index, ids in enumerate(prompts)
            ]
            return await asyncio.gather(*requests)

        groups = zip(prompts, engine.run(answers()), strict=True)
        samples = [
            Answer(ids, completion, [0.0, 0.8][index % 2])
            for index, (ids, group) in enumerate(groups)
            for completion in group
        ]
        assert len(samples) == 2 * len(prompts)
        assert_agrees(models, name, samples)
        scores_of_prompts = engine.run(engine.client.score([ids for ids in prompts if len(ids) > 1], 0.7))
        for ids, scores in zip([ids for ids in prompts if len(ids) > 1], scores_of_prompts, strict=True):
            np.testing.assert_allclose(scores, models.logprobs(name, ids, 0.7), atol=TOLERANCE)


@pytest.mark.parametrize("name_of_engine", ["qwen3_next", "qwen3_5_text tp2"])
def test_continuations_of_cached_prefixes_agree(
    name_of_engine: str, engines: Mapping[str, tuple[Models, RunningEngine]]
) -> None:
    """A turn continues from the state after the previous response, its fork from that after the turn's own prompt.

    States are cached at the ends of prompts and responses only, so a prompt that is one token shorter than the turn's
    continues from the previous turn's prompt.
    """
    models, engine = engines[name_of_engine]
    ids, name = prompt(30, seed=4), "A"  # every test restores the weights of A
    for turn in range(3):
        fork = np.concatenate([ids, prompt(3, seed=20 + turn)]).astype(np.int32)
        completions: list[Completion] = []
        for request_ids in (ids, fork, ids[:-1]):
            completions += engine.run(engine.client.generate(request_ids, [turn], make_sampling(0.9, 8)))
            assert_agrees(models, name, [Answer(request_ids, completions[-1], 0.9)])
        # The last token of a response is not in the cache: no request has computed its state yet.
        expected = (len(ids) - 1, len(ids), len(ids) - 8) if turn else (0, len(ids), 0)
        assert tuple(completion.cached_tokens for completion in completions) == expected
        ids = np.concatenate([ids, completions[0].token_ids]).astype(np.int32)


def test_requests_in_flight_continue_under_new_weights(engines: Mapping[str, tuple[Models, RunningEngine]]) -> None:
    """Each token is sampled under the weights of its version, as KV cache and delta rule states are recomputed."""
    models, engine = engines["qwen3_next"]
    ids = prompt(20, seed=9)
    for completion in generate_over_two_pushes(engine, models, ids, 150):
        np.testing.assert_allclose(completion.logprobs, logprobs_by_version(models, ids, completion), atol=TOLERANCE)


PATTERN_OF_UNWRITTEN = {
    "model.layers.1.linear_attn.A_log": r"linear_attn\.A_log \(4 of 4 ",
    "model.layers.1.linear_attn.dt_bias": r"linear_attn\.dt_bias \(4 of 4 ",
    "model.layers.2.linear_attn.conv1d.weight": r"linear_attn\.conv1d\.weight \(640 of 640 ",
    "model.layers.0.linear_attn.norm.weight": r"linear_attn\.norm\.weight \(24 of 24 ",
    "model.layers.0.linear_attn.in_proj_ba.weight": r"linear_attn\.in_proj_ba\.weight \(384 of 384 ",
    "model.layers.3.self_attn.q_norm.weight": r"q_norm\.weight \(32 of 32 ",
    "model.layers.3.mlp.experts.4.up_proj.weight": r"mlp\.experts\.w13_weight \(960 of 11520 ",
    "model.layers.3.mlp.experts.5.down_proj.weight": r"mlp\.experts\.w2_weight \(960 of 5760 ",
    "model.layers.2.mlp.shared_expert.gate_proj.weight": r"mlp\.shared_expert\.gate_up_proj\.weight \(1344 of 2688 ",
    "model.layers.2.mlp.shared_expert_gate.weight": r"mlp\.shared_expert_gate\.weight \(48 of 48 ",
    "model.layers.2.mlp.gate.weight": r"mlp\.gate\.weight \(288 of 288 ",
}


def test_a_commit_names_parameters_that_were_not_written(engines: Mapping[str, tuple[Models, RunningEngine]]) -> None:
    """A commit checks every kind of parameter of a hybrid MoE model, also an expert's part of a fused parameter."""
    models, engine = engines["qwen3_next"]
    for name, pattern in PATTERN_OF_UNWRITTEN.items():
        tensors = models.tensors("B")
        assert tensors.pop(name) is not None
        with pytest.raises(EngineError, match=f"not complete.*1 parameters: model.*{pattern}"):
            engine.run(engine.push(tensors, 7))
    engine.run(engine.push(models.tensors("A"), 8))


@pytest.mark.parametrize("name_of_engine", ENGINES)
def test_hybrid_models_do_not_use_the_fused_forward(
    name_of_engine: str, engines: Mapping[str, tuple[Models, RunningEngine]]
) -> None:
    says = engines[name_of_engine][1].server.decode_method()
    assert "module by module, as Qwen3" in says and "is not one of" in says
    assert "gated delta rule in torch" in says
