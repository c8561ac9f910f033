"""Conversion of SGLang's JSON replies to arrays."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from slime_like.data.routing import RoutingShape
from slime_like.errors import EngineError
from slime_like.rollout.engine.connection import (
    any_aborted,
    completions,
    error_text,
    scored_experts,
    scores,
    weight_version,
)


def answer(**changes: Any) -> dict[str, Any]:
    """Return a sample as in SGLang's reply."""
    meta = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    return {"output_ids": [7, 8, 9], "meta_info": meta | changes}


def test_a_reply_becomes_columns() -> None:
    (completion,) = completions([answer()], 1)
    np.testing.assert_array_equal(completion.token_ids, np.array([7, 8, 9], np.int32), strict=True)
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -1.5, -2.5], np.float32), strict=True)
    assert completion.versions == ((0, 1, 3), (1, 3, 4))
    assert completion.finish == "length"


def test_a_reply_with_columns_has_the_same_completion() -> None:
    def encoded(values: list[float], dtype: type[np.generic]) -> str:
        return base64.b64encode(np.array(values, dtype).tobytes()).decode()

    item = answer(slime_like_logprobs=encoded([-0.5, -1.5, -2.5], np.float32))
    del item["meta_info"]["output_token_logprobs"]
    (completion,) = completions([item | {"output_ids": encoded([7, 8, 9], np.int32)}], 1)
    np.testing.assert_array_equal(completion.token_ids, np.array([7, 8, 9], np.int32), strict=True)
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -1.5, -2.5], np.float32), strict=True)
    for column in ("no base64!", encoded([7, 8, 9], np.int32)[:-4]):
        with pytest.raises(EngineError, match="not base64 of int32"):
            completions([item | {"output_ids": column}], 1)
    with pytest.raises(EngineError, match="2 tokens but 3 log-probabilities"):
        completions([item | {"output_ids": encoded([7, 8], np.int32)}], 1)


def test_an_aborted_sample_without_tokens_has_no_span() -> None:
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}
    (completion,) = completions(
        [{"output_ids": [], "meta_info": meta | {"weight_versions": [{"version": "3", "start": 0, "end": 0}]}}], 1
    )
    assert (len(completion.token_ids), completion.versions, completion.finish) == (0, (), "abort")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"error": "x"}, "returned .* instead of 1 samples"),
        ([answer(), answer()], "returned .* instead of 1 samples"),
        ([{"text": "hi"}], "returned no 'output_ids'"),
        ([answer(output_token_logprobs=[[-0.5, 7, None]])], "3 tokens but 1 log-probabilities"),
        ([answer(weight_versions=[{"version": "default", "start": 0, "end": 3}])], "'default', which is not a number"),
        ([answer(weight_versions=[{"version": "-1", "start": 0, "end": 3}])], "'-1', which is not a number"),
    ],
)
def test_a_reply_that_is_not_an_answer_is_an_engine_error(reply: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completions(reply, 1)


SHAPE = RoutingShape(num_blocks=1, experts_per_token=2, num_experts=8, sparse_blocks=(0,))
MALFORMED = {
    "finish_reason": (None, "length", {}),
    "output_token_logprobs": (None, 3, [["low", 7, None]] * 3, [[], [], []], [1, 2, 3]),
    "slime_like_logprobs": (None, 3, "no base64!", [[0.5], [0.5], [0.5]]),
    "weight_versions": (None, [None], [{"version": "3"}], [{"version": "3", "start": None, "end": 3}]),
    "prompt_tokens": (None, "many", []),
    "cached_tokens": (None,),
    "routed_experts": (None, 3, "no base64!", "AAA="),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values], ids=repr
)
def test_a_malformed_field_is_an_engine_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=rf"/generate returned {name}=.*, which cannot be read \("):
        completions([answer(**({"routed_experts": "", "prompt_tokens": 1} | {name: value}))], 1, SHAPE)


NO_META = "/generate returned no 'meta_info'"
UNREADABLE_META = r"/generate returned meta_info=None, which cannot be read \("


@pytest.mark.parametrize(
    ("item", "message", "meta_message"),
    [
        (None, "/generate returned no 'output_ids': None", NO_META),
        (3, "/generate returned no 'output_ids': 3", NO_META),
        ({"output_ids": [7]}, NO_META, NO_META),
        ({"output_ids": [7], "meta_info": None}, UNREADABLE_META, UNREADABLE_META),
    ],
)
def test_a_sample_without_its_fields_is_an_engine_error(item: Any, message: str, meta_message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completions([item], 1)
    with pytest.raises(EngineError, match=meta_message):
        any_aborted([item])


@pytest.mark.parametrize("ids", [None, 3, [None], [[7]]], ids=repr)
def test_malformed_token_ids_are_an_engine_error(ids: Any) -> None:
    with pytest.raises(EngineError, match="/generate returned output_ids="):
        completions([answer() | {"output_ids": ids}], 1)


@pytest.mark.parametrize("triples", [None, 2, [[None, 4, None], None], [[None, 4, None], [[], 5, None]]], ids=repr)
def test_malformed_scores_are_an_engine_error(triples: Any) -> None:
    with pytest.raises(EngineError, match="/generate returned input_token_logprobs="):
        scores([{"meta_info": {"input_token_logprobs": triples}}], [2])
    for reply in (None, []):
        with pytest.raises(EngineError, match="instead of scores of 1 sequences"):
            scored_experts(reply, [2], SHAPE)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (None, "/model_info returned no 'weight_version': None"),
        ({}, "/model_info returned no 'weight_version': {}"),
        ({"weight_version": "default"}, "engine serves weight version 'default', which is not a number"),
        ({"weight_version": None}, "engine serves weight version None, which is not a number"),
    ],
)
def test_a_version_that_is_not_a_number_is_an_engine_error(reply: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        weight_version(reply)
    assert weight_version({"weight_version": "3"}) == 3


def test_scores_skip_the_first_token_and_are_counted() -> None:
    item = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-0.25, 5, None]]}}
    np.testing.assert_array_equal(scores([item], [2])[0], np.array([-0.25], np.float32), strict=True)
    with pytest.raises(EngineError, match="scored 2 of 3 tokens"):
        scores([item], [3])


@pytest.mark.parametrize(
    ("body", "reply", "text"),
    [
        (b"", {"error": {"message": "too long"}}, "HTTP 400: too long"),
        (b"", {"success": False, "message": "no session"}, "HTTP 400: no session"),
        (b"", {"detail": "paused"}, "HTTP 400: paused"),
        (b"", {"message": "not complete | open | not complete"}, "HTTP 400: not complete | open"),
        (b"plain", None, "HTTP 400: plain"),
        (b"", None, "HTTP 400: (no message)"),
    ],
)
def test_the_engines_error_message_is_extracted(body: bytes, reply: Any, text: str) -> None:
    assert error_text(400, body, reply) == text
