"""Engines of hybrid models (gated delta nets beside attention) say what transformers says, sequence by sequence.

Prompts longer than ``CHUNK`` are prefilled in pieces. Errors of float32 are larger than those of dense models: the norms
behind the delta rule divide by what may be small (transformers in float32 and in float64 differ by up to 4e-5 here).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.errors import EngineError
from slime_like.interfaces import Completion
from slime_like.types import I32
from tests.engine.conftest import Engine, Models, launch, prompt, sampled
from tests.engine.hybrid_models import FAMILIES, WITH_VISION, build
from tests.engine.in_flight import by_version, over_two_pushes

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4
CHUNK = 48
ENGINES = dict.fromkeys([*FAMILIES, WITH_VISION], 1) | {"qwen3_next tp2": 2, "qwen3_5_text tp2": 2}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Models]:
    return {family: build(tmp_path_factory.mktemp(family), family) for family in [*FAMILIES, WITH_VISION]}


@pytest.fixture(scope="module")
def served(
    hybrids: Mapping[str, Models], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, tuple[Models, Engine]]]:
    """All engines, started side by side."""
    with contextlib.ExitStack() as stack:
        begun: dict[str, tuple[Models, Any]] = {}
        for name, tp in ENGINES.items():
            models = hybrids[name.split()[0]]
            run = stack.enter_context(
                contextlib.closing(launch(models, tmp_path_factory.mktemp("run"), tp, chunked_prefill_size=CHUNK))
            )
            assert next(run) is None
            begun[name] = models, run
        yield {name: (models, next(run)) for name, (models, run) in begun.items()}


def assert_agrees(models: Models, name: str, ids: I32, completion: Completion, temperature: float) -> None:
    """Sampled log-probabilities are those of transformers; greedy tokens also the likeliest (of near-equal ones, one)."""
    whole, new = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
    expected = models.logprobs(name, whole, temperature or 1.0)[-new:]
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    if temperature == 0:
        with torch.no_grad():
            logits = models.hf[name](torch.from_numpy(whole[None].astype(np.int64))).logits[0, len(ids) - 1 : -1]
        best = torch.log_softmax(logits, -1).max(-1).values.numpy()
        np.testing.assert_allclose(expected, best, atol=TOLERANCE)


@pytest.mark.parametrize("which", ENGINES)
def test_a_batch_of_many_lengths_before_and_after_pushes(
    which: str, served: Mapping[str, tuple[Models, Engine]]
) -> None:
    """Several samples per prompt, greedy among sampled ones, prompts of 1 to 100 tokens, some the beginning of others."""
    models, engine = served[which]
    long = prompt(100, seed=5)
    prompts = [long, long[:60], prompt(1, seed=6), prompt(17, seed=7), long[:31]]
    for version, name in enumerate("ABA"):
        if version:
            engine.run(engine.push(models.tensors(name), version))

        async def answers() -> list[list[Completion]]:
            asked = [
                engine.client.generate(ids, [index, 50], sampled([0.0, 0.8][index % 2], 12 + 5 * index))
                for index, ids in enumerate(prompts)
            ]
            return await asyncio.gather(*asked)

        for index, (ids, group) in enumerate(zip(prompts, engine.run(answers()), strict=True)):
            for completion in group:
                assert_agrees(models, name, ids, completion, [0.0, 0.8][index % 2])
        scored = engine.run(engine.client.score([ids for ids in prompts if len(ids) > 1], 0.7))
        for ids, found in zip([ids for ids in prompts if len(ids) > 1], scored, strict=True):
            np.testing.assert_allclose(found, models.logprobs(name, ids, 0.7), atol=TOLERANCE)


@pytest.mark.parametrize("which", ["qwen3_next", "qwen3_5_text tp2"])
def test_continuations_of_cached_prefixes(which: str, served: Mapping[str, tuple[Models, Engine]]) -> None:
    """A turn goes on from the states behind the last prompt; another beginning with it does too; a third one misses."""
    models, engine = served[which]
    ids, name = prompt(30, seed=4), "A"  # every test leaves the weights of A
    for turn in range(3):
        fork = np.concatenate([ids, prompt(3, seed=20 + turn)]).astype(np.int32)
        found: list[Completion] = []
        for asked in (ids, fork, ids[:-1]):
            found += engine.run(engine.client.generate(asked, [turn], sampled(0.9, 8)))
            assert_agrees(models, name, asked, found[-1], 0.9)
        ids = np.concatenate([ids, found[0].token_ids]).astype(np.int32)
    log = Path(engine.server._spec.log_path).read_text()  # pyright: ignore[reportPrivateUsage]
    assert any(f"#cached-token: {length}," in log for length in (30, 38)), "no prefix was found again"


def test_requests_in_flight_go_on_under_new_weights(served: Mapping[str, tuple[Models, Engine]]) -> None:
    """Keys, values and delta rule states of what was there are computed again: each token is of its version's weights."""
    models, engine = served["qwen3_next"]
    ids = prompt(20, seed=9)
    for completion in over_two_pushes(engine, models, ids, 150):
        np.testing.assert_allclose(completion.logprobs, by_version(models, ids, completion), atol=TOLERANCE)


MISSING = {
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


def test_a_commit_names_what_was_not_written(served: Mapping[str, tuple[Models, Engine]]) -> None:
    """Every kind of parameter of a hybrid model with experts counts, down to one expert's part of a fused one."""
    models, engine = served["qwen3_next"]
    for name, found in MISSING.items():
        tensors = models.tensors("B")
        assert tensors.pop(name) is not None
        with pytest.raises(EngineError, match=f"not complete.*1 parameters: model.*{found}"):
            engine.run(engine.push(tensors, 7))
    engine.run(engine.push(models.tensors("A"), 8))


@pytest.mark.parametrize("which", ENGINES)
def test_the_fused_forward_stays_out_of_it(which: str, served: Mapping[str, tuple[Models, Engine]]) -> None:
    says = served[which][1].server.decodes_with()
    assert "module by module, as Qwen3" in says and "is none of" in says
    assert "gated delta rule in torch" in says
