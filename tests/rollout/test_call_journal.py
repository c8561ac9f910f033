"""Partial completions are concatenated, continued and saved, and no token is lost or repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.dump import load_groups, save_groups
from slime_like.interfaces import Completion, GenerateContext, Sampling
from slime_like.rollout.collect.collector import PromptQueue
from slime_like.rollout.collect.journal import CallJournal, RecordedCall, drop_last_token
from slime_like.rollout.collect.state import PartialGroup, QueuedPrompt, RolloutState, to_group
from slime_like.rollout.generate.episode import Episode
from slime_like.rollout.generate.single_turn import to_sample
from slime_like.types import Prompt, Source, Span
from tests.rollout.counting import Counting

IDS = np.array([5, 6, 7], np.int32)
NO_TOKENIZER: Any = None


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
    """The last token may end the sequence, since SGLang also reports an abort in the final step of a request."""
    cut = drop_last_token(part([1, 2, 3], (0, 2, 4), (2, 3, 5)))
    assert (cut.token_ids.tolist(), cut.logprobs.tolist(), cut.versions) == ([1, 2], [-1, -2], ((0, 2, 4),))
    complete_part = part([1, 2], (0, 2, 4), finish="stop")
    assert drop_last_token(complete_part) is complete_part
    empty = part([])
    assert drop_last_token(empty) is empty


def test_a_repeated_call_gets_its_answer_once() -> None:
    first = CallJournal()
    first.call(IDS, [1, 2]).append([0], [part([9], (0, 1, 3), finish="stop")])
    first.call(IDS, [3])
    replayed_journal = CallJournal(first.copy())
    assert replayed_journal.call(IDS + 1, [1, 2]).unfinished_indices() == [0, 1]  # another prompt
    assert replayed_journal.call(IDS, [1, 2]).completions()[0].token_ids.tolist() == [9]
    assert replayed_journal.call(IDS, [1, 2]).unfinished_indices() == [0, 1]  # a second identical call is sampled again
    assert (replayed_journal.oldest_version, replayed_journal.num_tokens) == (3, 1)
    assert (CallJournal().oldest_version, CallJournal().num_tokens) == (None, 0)


def test_calls_not_repeated_do_not_count_for_the_oldest_version() -> None:
    first = CallJournal()
    first.call(IDS, [1]).append([0], [part([9], (0, 1, 3), finish="stop")])
    first.call(IDS, [2]).append([0], [part([9], (0, 1, 7), finish="stop")])
    replayed_journal = CallJournal(first.copy())
    replayed_journal.call(IDS, [2])
    assert replayed_journal.oldest_version == 3  # the first call may still be repeated
    replayed_journal.close()
    assert (replayed_journal.oldest_version, replayed_journal.num_tokens) == (7, 1)


def record_calls(calls: list[list[Completion]]) -> tuple[RecordedCall, ...]:
    journal = CallJournal()
    for k, parts in enumerate(calls):
        journal.call(IDS[:k], range(len(parts))).append(range(len(parts)), parts)
    return journal.copy()


def test_samples_and_snapshots_are_views_of_the_tokens_in_flight() -> None:
    journal, context = CallJournal(), GenerateContext(Sampling(1.0, 9), str, 3, 6, 99, NO_TOKENIZER)
    call = journal.call(IDS, [1, 2])
    call.append([0, 1], [part([8], (0, 1, 4)), part([9, 9], (0, 2, 4), finish="stop")])
    snapshot = to_group(PartialGroup(3, Prompt(0, IDS, "", None, None), journal.copy()))
    call.append([0], [part([7, 7], (0, 2, 5), finish="length")])
    for index, (completion, tokens) in enumerate(zip(call.completions(), ([8, 7, 7], [9, 9]), strict=True)):
        sample = to_sample(Prompt(0, IDS, "", None, None), completion, context, seed=1, index=index)
        assert sample.token_ids.tolist() == [*IDS.tolist(), *tokens]
        assert np.shares_memory(sample.token_ids, completion.token_ids)
        assert np.shares_memory(sample.logprobs, completion.logprobs)
    assert [s.token_ids.tolist()[3:] for s in snapshot.samples] == [[8], [9, 9]]
    assert np.shares_memory(snapshot.samples[1].token_ids, call.completions()[1].token_ids)
    assert snapshot.samples[0].spans == (Span(0, 3, Source.PROMPT), Span(3, 4, Source.MODEL, 4))
    copied = to_sample(Prompt(0, IDS + 1, "", None, None), call.completions()[0], context, seed=1, index=0)
    assert copied.token_ids.tolist() == [*(IDS + 1).tolist(), 8, 7, 7], "another prompt than that of the call"


def test_an_episode_and_its_calls_share_their_tokens() -> None:
    """The call of each turn continues the row of the previous turn, and the episode is a view of that row."""
    journal, context = CallJournal(), GenerateContext(Sampling(1.0, 99), str, 3, 6, 999, NO_TOKENIZER)
    episodes = [Episode(IDS, context) for _ in range(2)]
    for turn in range(6):
        for seed, episode in enumerate(episodes):
            call = journal.call(episode.token_ids, [seed])
            tokens = [10 + turn, 20 + seed, 30]
            call.append([0], [part(tokens, (0, 3, turn), finish="stop")])
            (completion,) = call.completions()
            episode.append(completion)
            assert np.shares_memory(episode.token_ids, completion.token_ids)
            episode.insert(np.array([40, 41], np.int32))
    turns = [[10 + turn, 20 + 1, 30, 40, 41] for turn in range(6)]
    assert episodes[1].token_ids.tolist() == [*IDS.tolist(), *(token for tokens in turns for token in tokens)]
    assert [span.source for span in episodes[1].spans] == [Source.PROMPT, *[Source.MODEL, Source.TOOL] * 6]
    assert episodes[1].remaining_tokens == 99 - 18
    num_tokens = sum(map(len, episodes))
    assert journal.nbytes < 5 * 12 * num_tokens, "not one copy of the conversation per turn, which is 7 times as much"


def test_an_episode_does_not_take_over_tokens_that_it_marks_differently() -> None:
    """A second continuation of an answer has the answer in its prompt, which is not trained on."""
    journal, context = CallJournal(), GenerateContext(Sampling(1.0, 99), str, 3, 6, 999, NO_TOKENIZER)
    first = journal.call(IDS, [0])
    first.append([0], [part([8], (0, 1, 4), finish="stop")])
    shared_ids = np.array([*IDS, 8], np.int32)
    second = journal.call(shared_ids, [1])
    second.append([0], [part([9], (0, 1, 4), finish="stop")])
    episode = Episode(shared_ids, context)
    episode.append(second.completions()[0])
    assert episode.spans == (Span(0, 4, Source.PROMPT), Span(4, 5, Source.MODEL, 4))
    assert np.isnan(episode.logprobs).tolist() == [True] * 4 + [False]


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
            record_calls(g),
        )
        for i, g in enumerate(groups)
    )
    path = tmp_path_factory.getbasetemp() / "written.npz"
    save_groups(path, RolloutState({"at": 3}, prompts, unfinished).in_flight())
    restored = RolloutState.from_groups({"at": 3}, load_groups(path))
    assert [(w.prompt.prompt_id, w.num_aborts) for w in restored.queued] == [(i, i) for i in range(returned)]
    assert [u.group_id for u in restored.partial_groups] == list(range(len(groups)))
    for actual_group, expected_group in zip(restored.partial_groups, unfinished, strict=True):
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
