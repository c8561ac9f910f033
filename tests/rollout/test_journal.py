"""Calls and their parts: joined, interrupted and written without a token too many or too few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.dump import load_groups, save_groups
from slime_like.interfaces import Completion
from slime_like.rollout.collect.partial import NOTHING, EngineCall, PartialCompletions, Unfinished, continuable, joined
from slime_like.rollout.collect.prompt_queue import PromptQueue, QueuedPrompt
from slime_like.rollout.collect.state import RolloutState
from slime_like.types import Prompt
from tests.rollout.counting import Counting

IDS = np.array([5, 6, 7], np.int32)


def part(tokens: list[int], *versions: tuple[int, int, int], finish: str = "abort") -> Completion:
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32), versions, finish, 3, 2)


def test_parts_are_joined_in_order_and_spans_of_one_version_are_one() -> None:
    whole = joined(part([1, 2], (0, 1, 4), (1, 2, 5)), part([3, 4], (0, 1, 5), (1, 2, 6), finish="stop"))
    assert whole.token_ids.tolist() == [1, 2, 3, 4]
    assert whole.logprobs.tolist() == [-1, -2, -3, -4]
    assert whole.versions == ((0, 1, 4), (1, 3, 5), (3, 4, 6))
    assert (whole.finish, whole.prompt_tokens, whole.cached_tokens) == ("stop", 6, 4)


def test_the_last_token_of_what_was_aborted_is_sampled_again() -> None:
    """It may be the end of the sequence: SGLang reports a request that is aborted in that very step as aborted."""
    cut = continuable(part([1, 2, 3], (0, 2, 4), (2, 3, 5)))
    assert (cut.token_ids.tolist(), cut.logprobs.tolist(), cut.versions) == ([1, 2], [-1, -2], ((0, 2, 4),))
    ended = part([1, 2], (0, 2, 4), finish="stop")
    assert continuable(ended) is ended
    assert continuable(NOTHING) is NOTHING


def test_calls_that_are_repeated_find_their_answers_once() -> None:
    first = PartialCompletions()
    first.call(IDS, [1, 2]).completions[0] = part([9], (0, 1, 3), finish="stop")
    first.call(IDS, [3])
    again = PartialCompletions(first.copy())
    assert again.call(IDS + 1, [1, 2]).unfinished() == [0, 1]  # another prompt
    assert again.call(IDS, [1, 2]).completions[0].token_ids.tolist() == [9]
    assert again.call(IDS, [1, 2]).unfinished() == [0, 1]  # a second call of the kind is asked anew
    assert (again.oldest_version, again.num_tokens) == (3, 1)
    assert (PartialCompletions().oldest_version, PartialCompletions().num_tokens) == (None, 0)


def test_what_a_function_that_has_ended_did_not_ask_again_does_not_age_it() -> None:
    first = PartialCompletions()
    first.call(IDS, [1]).completions[0] = part([9], (0, 1, 3), finish="stop")
    first.call(IDS, [2]).completions[0] = part([9], (0, 1, 7), finish="stop")
    again = PartialCompletions(first.copy())
    again.call(IDS, [2])
    assert again.oldest_version == 3  # it may yet be asked
    again.close()
    assert (again.oldest_version, again.num_tokens) == (7, 1)


completions = st.builds(
    lambda tokens, version, finish: part(tokens, *([(0, len(tokens), version)] if tokens else []), finish=finish),
    st.lists(st.integers(2, 99), max_size=5),
    st.integers(0, 9),
    st.sampled_from(["stop", "length", "abort"]),
)
calls = st.lists(st.lists(completions, min_size=1, max_size=3), max_size=3)


@given(groups=st.lists(calls, max_size=3), returned=st.integers(0, 3))
def test_what_is_in_flight_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[list[Completion]]], returned: int
) -> None:
    prompts = tuple(QueuedPrompt(p, i) for i, p in enumerate(Counting().next(returned)))
    unfinished = tuple(
        Unfinished(
            i,
            Prompt(i, IDS, "t", "l", None),
            tuple(EngineCall(IDS[:k], tuple(range(len(c))), c) for k, c in enumerate(g)),
        )
        for i, g in enumerate(groups)
    )
    path = tmp_path_factory.getbasetemp() / "written.npz"
    save_groups(path, RolloutState({"at": 3}, prompts, unfinished).in_flight())
    found = RolloutState.of({"at": 3}, load_groups(path))
    assert [(w.prompt.prompt_id, w.given_up) for w in found.returned] == [(i, i) for i in range(returned)]
    assert [u.group_id for u in found.unfinished] == list(range(len(groups)))
    for one, other in zip(found.unfinished, unfinished, strict=True):
        for call, expected in zip(one.calls, other.calls, strict=True):
            assert (call.seeds, call.token_ids.tolist()) == (expected.seeds, expected.token_ids.tolist())
            for c, e in zip(call.completions, expected.completions, strict=True):
                assert c.token_ids.tolist() == e.token_ids.tolist()
                assert c.logprobs.tolist() == e.logprobs.tolist()
                assert (c.versions, c.finish) == (e.versions, e.finish)


@given(gives=st.lists(st.integers(0, 5), max_size=8))
def test_prompts_that_come_back_are_the_next_ones(gives: list[int]) -> None:
    queue, seen = PromptQueue(Counting()), []
    for n in gives:
        taken = queue.take(5)
        queue.give_back(taken[:n])
        seen += [waiting.prompt.prompt_id for waiting in taken[n:]]
        assert list(queue.returned[:n]) == taken[:n]
    rest = [waiting.prompt.prompt_id for waiting in queue.returned]
    assert sorted(seen + rest) == list(range(queue.source.state()["taken"]))
