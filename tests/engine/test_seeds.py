"""A seed determines a request's tokens for every kind of sampling, in any batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.closeness import assert_close
from tests.engine.conftest import Models, RunningEngine, prompt

pytestmark = pytest.mark.engine

PROMPT = prompt(8, seed=3)
EVEN_TOKENS = list(range(0, 500, 2))  # token ids that a processor forbids
# A pickled reference to the class, because importing SGLang takes seconds.
PROCESSOR = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "nucleus": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "processor": {"custom_params": {"token_ids": EVEN_TOKENS}},
    "mask": {"top_k": 20, "min_p": 0.05},  # SGLang's own sampler processes a batch with a mask
}


def ask(engine: RunningEngine, kinds: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """Send a request of each kind in one batch and return the replies."""
    request_params = {"max_new_tokens": 12, "sampling_seed": seed}
    request = {
        "input_ids": [PROMPT.tolist()] * len(kinds),
        "sampling_params": [{"temperature": 1.0} | KINDS[kind] | request_params for kind in kinds],
        "return_sampling_mask": [kind == "mask" for kind in kinds],
        "custom_logit_processor": [
            json.dumps({"callable": PROCESSOR.hex()}) if kind == "processor" else None for kind in kinds
        ],
        "return_logprob": True,
    }
    reply_list = engine.run(engine.client._connection.post("generate", "/generate", request))
    return dict(zip(kinds, reply_list, strict=True))


def tokens(reply: dict[str, Any]) -> list[int]:
    return reply["output_ids"]


@pytest.fixture(scope="module")
def replies(engine: RunningEngine) -> dict[str, dict[str, Any]]:
    return ask(engine, list(KINDS), seed=7)


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others(
    engine: RunningEngine, replies: dict[str, dict[str, Any]]
) -> None:
    kinds_without_mask = [kind for kind in KINDS if kind != "mask"]
    other_replies = ask(engine, list(KINDS), seed=8)
    for batch in (kinds_without_mask, *([kind] for kind in KINDS)):
        for kind, reply in ask(engine, batch, seed=7).items():
            assert tokens(reply) == tokens(replies[kind]), f"{kind} in a batch of {batch}"
    for kind in KINDS:
        assert (tokens(other_replies[kind]) == tokens(replies[kind])) == (kind == "greedy"), kind


def test_each_request_of_a_batch_keeps_its_sampling_limits(models: Models, replies: dict[str, dict[str, Any]]) -> None:
    def shares(kind: str) -> np.ndarray:
        """Return each token's probability relative to the most probable one."""
        sequence = torch.tensor([*PROMPT.tolist(), *tokens(replies[kind])])
        with torch.no_grad():
            probs_TV = models.hf["A"](sequence[None]).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
        return (probs_TV.gather(1, sequence[len(PROMPT) :, None])[:, 0] / probs_TV.amax(-1)).numpy()

    assert shares("min-p").min() > 0.3 - 1e-4
    assert shares("processor").min() < 0.3, "a request without min-p draws tokens that min-p excludes"
    assert all(token % 2 for token in tokens(replies["processor"]))
    support: list[list[int]] = replies["mask"]["meta_info"]["output_token_sampling_mask"]
    assert all(token in mask and len(mask) <= 20 for token, mask in zip(tokens(replies["mask"]), support, strict=True))
    assert shares("mask").min() > 0.05 - 1e-4
    assert min(map(len, support)) < 20, "min-p leaves fewer than top-k"


def test_logprobs_are_of_the_distribution_before_top_p_and_min_p(
    models: Models, replies: dict[str, dict[str, Any]]
) -> None:
    for kind in ("plain", "greedy", "nucleus", "min-p", "mask"):
        logprobs = np.array([item[0] for item in replies[kind]["meta_info"]["output_token_logprobs"]], np.float32)
        sequence = np.concatenate([PROMPT, np.array(tokens(replies[kind]), np.int32)])
        temperature = KINDS[kind].get("temperature") or 1.0
        assert_close(logprobs, models.logprobs("A", sequence, temperature)[-len(logprobs) :])
