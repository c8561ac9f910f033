"""Routed experts: parsed from a reply, kept in partial answers, dumps and batches, and required for trained tokens."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.algo.advantage import dr_grpo
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.dump import load_groups, save_groups
from slime_like.data.routing import ROUTED_EXPERTS, RoutingShape, check_dumped, routing_column, with_routing
from slime_like.errors import DataError, EngineError
from slime_like.interfaces import Completion, GenerateContext, Sampling
from slime_like.rollout.collect.journal import CallJournal, EngineCall, drop_last_token
from slime_like.rollout.collect.state import PartialGroup, from_group, to_group
from slime_like.rollout.engine.connection import completions
from slime_like.rollout.generate.episode import Episode
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status

SHAPE = RoutingShape(num_blocks=3, experts_per_token=2, num_experts=8, sparse_blocks=(1, 2))  # block 0 is dense
PROMPT = np.array([5, 6, 7], np.int32)


def experts(num_tokens: int, seed: int = 0) -> Any:
    """Return the experts [N, 3, 2] of an engine, zeros in the dense block."""
    out = np.random.default_rng(seed).random((num_tokens, 3, 8)).argsort(-1)[..., :2].astype(np.uint8)
    out[:, 0] = 0
    return out


def sample(index: int, num_sampled: int, status: Status = Status.COMPLETED, **changes: Any) -> Sample:
    length = len(PROMPT) + num_sampled
    values: dict[str, Any] = {
        "token_ids": np.arange(length, dtype=np.int32),
        "logprobs": np.full(length, -1.0, np.float32),
        "spans": (Span(0, len(PROMPT), Source.PROMPT), Span(len(PROMPT), length, Source.MODEL, 1)),
        "reward": Reward(float(index)),
        "extras": routing_column(experts(length - 1, index), length),
    }
    return Sample(0, index, index, index, status=status, **(values | changes))


def group(*samples: Sample) -> SampleGroup:
    return SampleGroup(0, Prompt(0, PROMPT, "", None, None), samples)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_experts_are_stored_in_the_smallest_type(num_experts: int, dtype: Any) -> None:
    shape = replace(SHAPE, num_experts=num_experts)
    largest = np.full((4, 3, 2), num_experts - 1, np.int32)
    np.testing.assert_array_equal(shape.parse(largest.tobytes(), 4), largest.astype(dtype), strict=True)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (np.zeros((4, 2, 2), np.int32), r"returned 16 routed experts, not 4 \* 3 \* 2"),
        (np.full((4, 3, 2), 8, np.int32), "experts 8 to 8, but config.json has 8"),
        (np.full((4, 3, 2), -1, np.int32), "experts -1 to -1"),
    ],
)
def test_experts_of_another_model_are_refused(flat: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SHAPE.parse(flat.tobytes(), 4)


def reply(num_prompt: int, num_sampled: int, rows: Any, finish: str = "length") -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-1.0, 7, None]] * num_sampled,
        "weight_versions": [{"version": "1", "start": 0, "end": num_sampled}],
        "prompt_tokens": num_prompt,
    }
    encoded = {} if rows is None else {ROUTED_EXPERTS: base64.b64encode(rows.astype(np.int32).tobytes()).decode()}
    return {"output_ids": [7] * num_sampled, "meta_info": meta | encoded}


def test_a_reply_has_experts_unless_it_was_aborted_before_its_tokens_were_computed_again() -> None:
    rows = experts(6)
    complete, aborted = completions([reply(3, 4, rows), reply(3, 2, None, "abort")], 2, SHAPE)
    np.testing.assert_array_equal(complete.routed_experts, rows, strict=True)
    assert aborted.routed_experts is None
    with pytest.raises(EngineError, match="no 'routed_experts'"):
        completions([reply(3, 4, None)], 1, SHAPE)
    assert completions([reply(3, 4, None)], 1)[0].routed_experts is None


def completion(num_sampled: int, rows: Any, finish: str) -> Completion:
    ids = np.full(num_sampled, 7, np.int32)
    return Completion(ids, -np.ones(num_sampled, np.float32), ((0, num_sampled, 1),), finish, routed_experts=rows)


def test_a_continued_answer_has_the_experts_of_its_last_request() -> None:
    first = drop_last_token(completion(4, experts(6, 1), "abort"))
    assert first.routed_experts is not None and len(first.routed_experts) == len(PROMPT) + 3 - 1
    call = recorded_call(first)
    call.append([0], [completion(0, None, "abort")])  # never scheduled
    (partial,) = call.completions()
    np.testing.assert_array_equal(partial.routed_experts, first.routed_experts, strict=True)
    last = experts(len(PROMPT) + 5 - 1, 2)
    call.append([0], [completion(2, last, "stop")])
    (complete,) = call.completions()
    np.testing.assert_array_equal(complete.routed_experts, last, strict=True)
    np.testing.assert_array_equal(partial.routed_experts, first.routed_experts, strict=True)  # views do not change


def recorded_call(*parts: Completion) -> EngineCall:
    call = CallJournal().call(PROMPT, range(1, len(parts) + 1))
    call.append(range(len(parts)), parts)
    return call


def test_a_partial_answer_is_restored_with_its_experts() -> None:
    rows = experts(len(PROMPT) + 3)
    calls = (recorded_call(completion(4, rows, "stop"), completion(2, None, "abort")).record(),)
    (call,) = from_group(to_group(PartialGroup(0, Prompt(0, PROMPT, "", None, None), calls))).calls
    np.testing.assert_array_equal(call.completions[0].routed_experts, rows, strict=True)
    assert call.completions[1].routed_experts is None


def test_an_episode_has_the_experts_of_its_last_turn() -> None:
    context = GenerateContext(Sampling(1.0, 16), str, 0, 0, 64, tokenizer=None)  # pyright: ignore[reportArgumentType]
    episode = Episode(PROMPT, context)
    episode.append(completion(2, experts(4, 1), "stop"))
    episode.insert(np.array([9, 9], np.int32))
    last = experts(len(PROMPT) + 2 + 2 + 3 - 1, 2)
    episode.append(completion(3, last, "stop"))
    episode.insert(np.array([9], np.int32))
    column = episode.sample(index=0, seed=1, text="").extras[ROUTED_EXPERTS]
    np.testing.assert_array_equal(column[: len(last)], last)
    assert len(column) == len(last) + 2 and not column[len(last) :].any()


def test_batches_and_dumps_have_the_experts_of_each_token(tmp_path: Path) -> None:
    failed = sample(2, 4, Status.FAILED, extras={})
    save_groups(tmp_path / "dump.npz", [group(sample(0, 4), sample(1, 2), failed)])
    groups = load_groups(tmp_path / "dump.npz")
    check_dumped(groups, SHAPE, "dump.npz")
    spec = AssembleSpec(dr_grpo, "token_mean", 1, 1, 9, 16, routing=SHAPE)
    rows = assemble(groups, spec, 0).steps[0].micro_batches[0]
    assert len(rows) > 1
    for row in rows:
        column = row.extras[ROUTED_EXPERTS]
        assert column.dtype == np.uint8 and column.shape == (len(row.token_ids), 3, 2)
        for index, sample_id in enumerate(row.sample_ids.tolist()):
            part = column[row.cu_seqlens[index] : row.cu_seqlens[index + 1]]
            expected = (
                np.zeros_like(part)
                if sample_id == 2
                else np.append(experts(len(part) - 1, sample_id), part[-1:] * 0, 0)
            )
            np.testing.assert_array_equal(part, expected)


def test_trained_tokens_without_experts_are_named() -> None:
    with pytest.raises(EngineError, match=r"sample 0 of group 0 has no routed experts.*rollout.generate"):
        with_routing([group(sample(0, 4, extras={}))], SHAPE)
    for token, is_needed in ((1, False), (2, True), (5, True), (6, False)):
        column = sample(0, 4).extras[ROUTED_EXPERTS].copy()
        column[token, 2] = 0
        damaged = [group(sample(0, 4, extras={ROUTED_EXPERTS: column}))]
        if is_needed:
            with pytest.raises(EngineError, match=f"no experts of layer 2 for token {token},"):
                with_routing(damaged, SHAPE)
            with pytest.raises(DataError, match=r"^x: sample 0.*dump it with algo.routing_replay=rollout"):
                check_dumped(damaged, SHAPE, "x")
        else:
            with_routing(damaged, SHAPE)
    with pytest.raises(EngineError, match=r"of uint8 \[7, 3, 2\], but .* need uint16"):
        with_routing([group(sample(0, 4))], replace(SHAPE, num_experts=300))
