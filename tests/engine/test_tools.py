"""Multi-turn examples on a real engine: the model reads tokens of tools and environments but is not trained on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples import calculator, second_try
from slime_like.data.chat import tokenize
from slime_like.errors import ConfigError
from slime_like.types import Prompt, Reward, Source, Status
from tests.engine.conftest import Models, RunningEngine
from tests.engine.conftest import prompt as random_prompt
from tests.engine.masks import check_samples
from tests.engine.words import context, write_words

pytestmark = pytest.mark.engine
CALL = ("<calc>", "7", "+", "5", "</calc>")


def test_a_calculator_is_called_and_not_trained_on(engine: RunningEngine, models: Models, tmp_path: Path) -> None:
    """The model is random, so the tokenizer gives its sampled tokens the texts of a call."""
    ids, seeds = random_prompt(6, seed=3), list(range(12))
    plain_context = context(write_words(tmp_path / "plain"), tokens=60)
    completions = engine.run(engine.client.generate(ids, seeds, plain_context.sampling))
    length = 1 + len(CALL)
    seed, completion = next(
        (s, c) for s, c in zip(seeds, completions, strict=True) if len({*c.token_ids[:length].tolist()}) == length
    )
    call_ids = completion.token_ids[1:length].tolist()
    tokenizer = write_words(
        tmp_path / "named", dict(zip(CALL, call_ids, strict=True)) | {"<result>": 497, "</result>": 498}
    )
    prompt = Prompt(0, ids, "", "12", None)
    samples = engine.run(calculator.generate(prompt, engine.client, [seed, 106, 107], context(tokenizer)))
    assert [s.sample_id for s in samples] == [12, 13, 14]
    sample = samples[0]
    result = tokenize(tokenizer, ["<result>12</result>"])[0]
    assert [s.source for s in sample.spans][:4] == [Source.PROMPT, Source.MODEL, Source.TOOL, Source.MODEL]
    tool = sample.spans[2]
    np.testing.assert_array_equal(sample.token_ids[tool.start : tool.stop], result)
    np.testing.assert_array_equal(sample.token_ids[: tool.start], [*ids, completion.token_ids[0], *call_ids])
    assert sample.num_response_tokens <= 60
    last_turn = sample.spans[-1]
    assert last_turn.source is Source.MODEL
    last_ids = sample.token_ids[last_turn.start : last_turn.stop].tolist()
    assert sample.text == tokenizer.decode(last_ids, skip_special_tokens=True), "the reward reads only the last turn"
    check_samples(engine, models, prompt, samples)


def test_a_tokenizer_without_the_marks_is_refused(engine: RunningEngine, tmp_path: Path) -> None:
    prompt = Prompt(0, random_prompt(6), "", "12", None)
    with pytest.raises(ConfigError, match=r"<calc> with 6 tokens"):
        engine.run(calculator.generate(prompt, engine.client, [1], context(write_words(tmp_path))))


def test_a_wrong_answer_gets_a_second_try(engine: RunningEngine, models: Models, tmp_path: Path) -> None:
    tokenizer = write_words(tmp_path)
    long_context = context(tokenizer, tokens=90)
    prompt = Prompt(0, random_prompt(6, seed=4), "", "never said", None)
    samples = engine.run(second_try.generate(prompt, engine.client, [1, 2], long_context))
    assert all(s.reward == Reward(0.0, 0.0) for s in samples)
    check_samples(engine, models, prompt, samples)
    # Stopping at many tokens makes turns short: the first answer that ends is then called wrong.
    stops = tuple(range(1, 500, 4))
    short_turns = replace(long_context, sampling=replace(long_context.sampling, stop_token_ids=stops))
    tried_samples = engine.run(second_try.generate(prompt, engine.client, [1, 2], short_turns))
    assert all(s.num_turns == second_try.MAX_TURNS and s.status is Status.COMPLETED for s in tried_samples)
    feedback = tokenize(tokenizer, [second_try.WRONG])[0]
    for sample in tried_samples:
        feedback_ids = [sample.token_ids[s.start : s.stop] for s in sample.spans if s.source is Source.TOOL]
        assert len(feedback_ids) == 2 and all(np.array_equal(ids, feedback) for ids in feedback_ids)
    check_samples(engine, models, prompt, tried_samples)
    answer = tried_samples[0].text.strip()
    answerable_prompt = Prompt(0, prompt.token_ids, "", answer, None)
    (solved,) = engine.run(second_try.generate(answerable_prompt, engine.client, [1], short_turns))
    assert solved.reward is not None and solved.reward.accuracy == 1.0
    assert solved.reward.score == second_try.DISCOUNT ** (solved.num_turns - 1)
