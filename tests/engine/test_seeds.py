"""A seed decides a request's tokens whatever it asks of the sampler, and whatever others of its batch ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.closeness import assert_close
from tests.engine.conftest import Engine, Models, prompt

pytestmark = pytest.mark.engine

PROMPT = prompt(8, seed=3)
EVEN = list(range(0, 500, 2))  # token ids that a processor forbids
# By reference: the class is the engine's own, and importing SGLang takes seconds.
PROCESSOR = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "nucleus": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "processor": {"custom_params": {"token_ids": EVEN}},
    "mask": {"top_k": 20, "min_p": 0.05},  # its batch goes SGLang's own way
}


def ask(engine: Engine, kinds: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """A request of each kind in one batch; the replies."""
    own = {"max_new_tokens": 12, "sampling_seed": seed}
    request = {
        "input_ids": [PROMPT.tolist()] * len(kinds),
        "sampling_params": [{"temperature": 1.0} | KINDS[kind] | own for kind in kinds],
        "return_sampling_mask": [kind == "mask" for kind in kinds],
        "custom_logit_processor": [
            json.dumps({"callable": PROCESSOR.hex()}) if kind == "processor" else None for kind in kinds
        ],
        "return_logprob": True,
    }
    replies = engine.run(engine.client._post("generate", "/generate", request))
    return dict(zip(kinds, replies, strict=True))


def tokens(reply: dict[str, Any]) -> list[int]:
    return reply["output_ids"]


@pytest.fixture(scope="module")
def together(engine: Engine) -> dict[str, dict[str, Any]]:
    return ask(engine, list(KINDS), seed=7)


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others(
    engine: Engine, together: dict[str, dict[str, Any]]
) -> None:
    unmasked = [kind for kind in KINDS if kind != "mask"]
    other = ask(engine, list(KINDS), seed=8)
    for batch in (unmasked, *([kind] for kind in KINDS)):
        for kind, reply in ask(engine, batch, seed=7).items():
            assert tokens(reply) == tokens(together[kind]), f"{kind} in a batch of {batch}"
    for kind in KINDS:
        assert (tokens(other[kind]) == tokens(together[kind])) == (kind == "greedy"), kind


def test_what_a_request_asks_for_holds_beside_others(models: Models, together: dict[str, dict[str, Any]]) -> None:
    def shares(kind: str) -> np.ndarray:
        """Return each token's probability relative to the most probable one."""
        whole = torch.tensor([*PROMPT.tolist(), *tokens(together[kind])])
        with torch.no_grad():
            probs_TV = models.hf["A"](whole[None]).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
        return (probs_TV.gather(1, whole[len(PROMPT) :, None])[:, 0] / probs_TV.amax(-1)).numpy()

    assert shares("min-p").min() > 0.3 - 1e-4
    assert shares("processor").min() < 0.3, "one without min-p draws what min-p excludes"
    assert all(token % 2 for token in tokens(together["processor"]))
    support: list[list[int]] = together["mask"]["meta_info"]["output_token_sampling_mask"]
    assert all(token in mask and len(mask) <= 20 for token, mask in zip(tokens(together["mask"]), support, strict=True))
    assert shares("mask").min() > 0.05 - 1e-4
    assert min(map(len, support)) < 20, "min-p leaves fewer than top-k"


def test_log_probabilities_are_those_of_the_distribution_before_it_was_cut(
    models: Models, together: dict[str, dict[str, Any]]
) -> None:
    for kind in ("plain", "greedy", "nucleus", "min-p", "mask"):
        found = np.array([item[0] for item in together[kind]["meta_info"]["output_token_logprobs"]], np.float32)
        whole = np.concatenate([PROMPT, np.array(tokens(together[kind]), np.int32)])
        temperature = KINDS[kind].get("temperature") or 1.0
        assert_close(found, models.logprobs("A", whole, temperature)[-len(found) :])
