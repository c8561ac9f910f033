"""Partial completions: concatenated, continued and saved without losing or repeating a token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.dump import load_groups, save_groups
from slime_like.interfaces import Completion
from slime_like.rollout.collect.collector import PromptQueue
from slime_like.rollout.collect.journal import CallJournal, RecordedCall
from slime_like.rollout.collect.resumable import drop_last_token
from slime_like.rollout.collect.state import PartialGroup, QueuedPrompt, RolloutState
from slime_like.types import Prompt
from tests.rollout.counting import Counting

IDS = np.array([5, 6, 7], np.int32)


def part(tokens: list[int], *versions: tuple[int, int, int], finish: str = "abort") -> Completion:
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32), versions, finish, 3, 2)


def test_parts_are_joined_and_spans_of_one_version_merged() -> None:
    call = CallJournal().call(IDS, [1])
    call.append([0], [part([1, 2], (0, 1, 4), (1, 2, 5))])
    call.append([0], [part([3, 4], (0, 1, 5), (1, 2, 6), finish="stop")])
    (completion,) = call.completions()
    assert completion.token_ids.tolist() == [1, 2, 3, 4]
    assert completion.logprobs.tolist() == [-1, -2, -3, -4]
    assert completion.versions == ((0, 1, 4), (1, 3, 5), (3, 4, 6))
    assert (completion.finish, completion.prompt_tokens, completion.cached_tokens) == ("stop", 6, 4)


def test_the_last_token_of_an_aborted_part_is_sampled_again() -> None:
    """The last token may end the sequence: SGLang reports a request as aborted even if the abort came in its final step."""
    cut = drop_last_token(part([1, 2, 3], (0, 2, 4), (2, 3, 5)))
    assert (cut.token_ids.tolist(), cut.logprobs.tolist(), cut.versions) == ([1, 2], [-1, -2], ((0, 2, 4),))
    ended = part([1, 2], (0, 2, 4), finish="stop")
    assert drop_last_token(ended) is ended
    empty = part([])
    assert drop_last_token(empty) is empty


def test_a_repeated_call_gets_its_answer_once() -> None:
    first = CallJournal()
    first.call(IDS, [1, 2]).append([0], [part([9], (0, 1, 3), finish="stop")])
    first.call(IDS, [3])
    replayed = CallJournal(first.copy())
    assert replayed.call(IDS + 1, [1, 2]).unfinished() == [0, 1]  # another prompt
    assert replayed.call(IDS, [1, 2]).completions()[0].token_ids.tolist() == [9]
    assert replayed.call(IDS, [1, 2]).unfinished() == [0, 1]  # a second identical call is sampled again
    assert (replayed.oldest_version, replayed.num_tokens) == (3, 1)
    assert (CallJournal().oldest_version, CallJournal().num_tokens) == (None, 0)


def test_calls_not_repeated_do_not_count_for_the_oldest_version() -> None:
    first = CallJournal()
    first.call(IDS, [1]).append([0], [part([9], (0, 1, 3), finish="stop")])
    first.call(IDS, [2]).append([0], [part([9], (0, 1, 7), finish="stop")])
    replayed = CallJournal(first.copy())
    replayed.call(IDS, [2])
    assert replayed.oldest_version == 3  # the first call may still be repeated
    replayed.close()
    assert (replayed.oldest_version, replayed.num_tokens) == (7, 1)


def recorded(calls: list[list[Completion]]) -> tuple[RecordedCall, ...]:
    journal = CallJournal()
    for k, parts in enumerate(calls):
        journal.call(IDS[:k], range(len(parts))).append(range(len(parts)), parts)
    return journal.copy()


completions = st.builds(
    lambda tokens, version, finish: part(tokens, *([(0, len(tokens), version)] if tokens else []), finish=finish),
    st.lists(st.integers(2, 99), max_size=5),
    st.integers(0, 9),
    st.sampled_from(["stop", "length", "abort"]),
)
calls = st.lists(st.lists(completions, min_size=1, max_size=3), max_size=3)


@given(groups=st.lists(calls, max_size=3), returned=st.integers(0, 3))
def test_unfinished_groups_are_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[list[Completion]]], returned: int
) -> None:
    prompts = tuple(QueuedPrompt(p, i) for i, p in enumerate(Counting().next(returned)))
    unfinished = tuple(
        PartialGroup(
            i,
            Prompt(i, IDS, "t", "l", None),
            recorded(g),
        )
        for i, g in enumerate(groups)
    )
    path = tmp_path_factory.getbasetemp() / "written.npz"
    save_groups(path, RolloutState({"at": 3}, prompts, unfinished).in_flight())
    loaded = RolloutState.from_groups({"at": 3}, load_groups(path))
    assert [(w.prompt.prompt_id, w.num_aborts) for w in loaded.queued] == [(i, i) for i in range(returned)]
    assert [u.group_id for u in loaded.partial_groups] == list(range(len(groups)))
    for actual_group, expected_group in zip(loaded.partial_groups, unfinished, strict=True):
        for call, expected in zip(actual_group.calls, expected_group.calls, strict=True):
            assert (call.seeds, call.token_ids.tolist()) == (expected.seeds, expected.token_ids.tolist())
            for c, e in zip(call.completions, expected.completions, strict=True):
                assert c.token_ids.tolist() == e.token_ids.tolist()
                assert c.logprobs.tolist() == e.logprobs.tolist()
                assert (c.versions, c.finish) == (e.versions, e.finish)


@given(num_returned=st.lists(st.integers(0, 5), max_size=8))
def test_returned_prompts_come_first(num_returned: list[int]) -> None:
    source = Counting()
    queue, used_ids = PromptQueue(source), []
    for n in num_returned:
        batch = queue.take(5)
        queue.give_back(batch[:n])
        used_ids += [waiting.prompt.prompt_id for waiting in batch[n:]]
        assert list(queue.queued[:n]) == batch[:n]
    remaining = [waiting.prompt.prompt_id for waiting in queue.queued]
    assert sorted(used_ids + remaining) == list(range(source.state()["taken"]))
