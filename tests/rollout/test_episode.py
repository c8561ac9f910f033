"""Multi-turn episodes: columns, spans and remaining tokens; tokens of tools are never trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.assemble import column
from slime_like.interfaces import Completion, GenerateContext, Sampling
from slime_like.rollout.generate.episode import Episode
from slime_like.types import Source, Status

NO_TOKENIZER: Any = None


def context(max_new: int = 100, max_len: int = 200) -> GenerateContext:
    return GenerateContext(Sampling(1.0, max_new, stop_token_ids=(1,)), str, 3, 12, max_len, NO_TOKENIZER)


def completion(tokens: list[int], *versions: tuple[int, int, int], finish: str = "stop") -> Completion:
    spans = versions or ((0, len(tokens), 5),)
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32) / np.float32(10), spans, finish)


PIECES = st.lists(
    st.tuples(st.sampled_from(["model", "tool"]), st.lists(st.integers(2, 99), min_size=1, max_size=5)), max_size=6
)


@given(st.lists(st.integers(2, 99), min_size=1, max_size=5), PIECES)
def test_every_token_keeps_its_source_and_logprob(prompt: list[int], pieces: list[tuple[str, list[int]]]) -> None:
    episode = Episode(np.array(prompt, np.int32), context())
    tokens, trained = list(prompt), [False] * len(prompt)
    for source, ids in pieces:
        if source == "model":
            episode.append(completion(ids))
        else:
            episode.insert(np.array(ids, np.int32))
        tokens += ids
        trained += [source == "model"] * len(ids)
    sample = episode.sample(index=2, seed=7, text="")
    assert sample.token_ids.tolist() == tokens
    columns = column(sample, None)
    assert columns.trained.tolist() == trained
    expected = [-t / 10 if sampled else 0.0 for t, sampled in zip(tokens, trained, strict=True)]
    np.testing.assert_allclose(columns.rollout_logprobs, expected, rtol=1e-6)
    assert np.array_equal(np.isnan(sample.logprobs), ~np.array(trained))
    assert (sample.sample_id, sample.episode_id, sample.group_id, sample.seed) == (14, 14, 3, 7)
    assert episode.remaining_tokens == 100 - sum(trained)


def test_remaining_tokens_respect_turns_and_context() -> None:
    episode = Episode(np.arange(10, dtype=np.int32), context(max_new=8, max_len=20))
    assert episode.sampling(9).max_new_tokens == 8
    assert episode.sampling(9).stop_token_ids == (1, 9)
    episode.append(completion([4, 5, 6]))
    assert episode.remaining_tokens == 5
    episode.insert(np.array([7, 7, 7], np.int32))
    assert episode.remaining_tokens == 4, "the context has 20 tokens"
    assert episode.status is Status.COMPLETED
    episode.insert(np.full(9, 7, np.int32))
    assert episode.status is Status.TRUNCATED
    sample = episode.sample(index=0, seed=0, text="")
    assert len(sample.token_ids) == 20, "a sample never exceeds the context"
    assert sample.spans[-1].stop == 20


def test_turns_are_counted_by_source_not_by_version() -> None:
    episode = Episode(np.array([2, 3], np.int32), context())
    episode.append(completion([4, 5, 6], (0, 1, 5), (1, 3, 6)))
    assert episode.sample(index=0, seed=0, text="").num_turns == 1
    episode.insert(np.array([7], np.int32))
    episode.append(completion([8], finish="length"))
    sample = episode.sample(index=0, seed=0, text="")
    assert (sample.num_turns, sample.versions, sample.status) == (2, (5, 5, 6), Status.TRUNCATED)
    assert [span.source for span in sample.spans] == [
        Source.PROMPT,
        Source.MODEL,
        Source.MODEL,
        Source.TOOL,
        Source.MODEL,
    ]
