"""The examples of several turns on a real engine: what tools and environments write is read by the model, never trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples import calculator, second_try
from slime_like.data.chat import tokenize
from slime_like.errors import ConfigError
from slime_like.types import Prompt, Reward, Source, Status
from tests.engine.conftest import Engine, Models
from tests.engine.conftest import prompt as random_prompt
from tests.engine.masks import check_samples
from tests.engine.words import context, write_words

pytestmark = pytest.mark.engine
CALL = ("<calc>", "7", "+", "5", "</calc>")


def test_a_calculator_is_called_and_not_trained_on(engine: Engine, models: Models, tmp_path: Path) -> None:
    """The model is random: its tokens are given the names that make what it samples a call."""
    ids, seeds = random_prompt(6, seed=3), list(range(12))
    plain = context(write_words(tmp_path / "plain"), tokens=60)
    drawn = engine.run(engine.client.generate(ids, seeds, plain.sampling))
    length = 1 + len(CALL)
    seed, free = next(
        (s, c) for s, c in zip(seeds, drawn, strict=True) if len({*c.token_ids[:length].tolist()}) == length
    )
    said = free.token_ids[1:length].tolist()
    tokenizer = write_words(
        tmp_path / "named", dict(zip(CALL, said, strict=True)) | {"<result>": 497, "</result>": 498}
    )
    prompt = Prompt(0, ids, "", "12", None)
    samples = engine.run(calculator.generate(prompt, engine.client, [seed, 106, 107], context(tokenizer)))
    assert [s.sample_id for s in samples] == [12, 13, 14]
    called = samples[0]
    result = tokenize(tokenizer, ["<result>12</result>"])[0]
    assert [s.source for s in called.spans][:4] == [Source.PROMPT, Source.MODEL, Source.TOOL, Source.MODEL]
    tool = called.spans[2]
    np.testing.assert_array_equal(called.token_ids[tool.start : tool.stop], result)
    np.testing.assert_array_equal(called.token_ids[: tool.start], [*ids, free.token_ids[0], *said])
    assert called.num_response_tokens <= 60
    assert "12" not in called.text[:2], "the reward reads the last turn, not the tool"
    check_samples(engine, models, prompt, samples)


def test_a_tokenizer_without_the_marks_is_refused(engine: Engine, tmp_path: Path) -> None:
    prompt = Prompt(0, random_prompt(6), "", "12", None)
    with pytest.raises(ConfigError, match=r"<calc> with 6 tokens"):
        engine.run(calculator.generate(prompt, engine.client, [1], context(write_words(tmp_path))))


def test_a_wrong_answer_gets_a_second_try(engine: Engine, models: Models, tmp_path: Path) -> None:
    tokenizer = write_words(tmp_path)
    short = context(tokenizer, tokens=90)
    prompt = Prompt(0, random_prompt(6, seed=4), "", "never said", None)
    samples = engine.run(second_try.generate(prompt, engine.client, [1, 2], short))
    assert all(s.reward == Reward(0.0, 0.0) for s in samples)
    check_samples(engine, models, prompt, samples)
    # Stopping at many tokens makes turns short: the first answer that ends is then called wrong.
    stops = tuple(range(1, 500, 4))
    often = replace(short, sampling=replace(short.sampling, stop_token_ids=stops))
    tried = engine.run(second_try.generate(prompt, engine.client, [1, 2], often))
    assert all(s.num_turns == second_try.MAX_TURNS and s.status is Status.COMPLETED for s in tried)
    feedback = tokenize(tokenizer, [second_try.WRONG])[0]
    for sample in tried:
        told = [sample.token_ids[s.start : s.stop] for s in sample.spans if s.source is Source.TOOL]
        assert len(told) == 2 and all(np.array_equal(ids, feedback) for ids in told)
    check_samples(engine, models, prompt, tried)
    right = tried[0].text.strip()
    known = Prompt(0, prompt.token_ids, "", right, None)
    (won,) = engine.run(second_try.generate(known, engine.client, [1], often))
    assert won.reward is not None and won.reward.accuracy == 1.0
    assert won.reward.score == second_try.DISCOUNT ** (won.num_turns - 1)
