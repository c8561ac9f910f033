"""Agents with a stock openai client against a real engine: every token as it was sampled, every mistake in OpenAI's words."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import calculator_agent
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.chat import tokenize
from slime_like.errors import AgentError, ConfigError, EngineError
from slime_like.metrics.dictionary import ENTRIES
from slime_like.rollout.agent.generate import MAX_FIRST_FAILURES, OpenAIAgent
from slime_like.rollout.engine.client import EngineClient
from slime_like.types import Prompt, Reward, Sample, Source, Status
from tests.e2e.leftovers import beyond_loopback, listened_on
from tests.engine import agents
from tests.engine.conftest import Engine, Models
from tests.engine.masks import by_model, check_samples
from tests.engine.words import context, write_words

pytestmark = pytest.mark.engine
PROMPT = Prompt(0, np.array([9, 9], np.int32), "tell me", "label", None, {"level": 3})


class Played:
    """Runs of one agent, and what the run reports of them."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.metrics: dict[str, float] = {}
        self.warnings: tuple[str, ...] = ()
        self.addresses: list[str] = []  # that this process listens at, the endpoint's among them

    def play(
        self, agent: Callable[..., Coroutine[Any, Any, Any]], seeds: list[int], *, client: Any = None, **how: Any
    ) -> list[Sample]:
        agents.heard.clear()
        seconds = how.pop("seconds", 60.0)
        settings = RolloutConfig(
            generate="openai_agent", agent=f"{agent.__module__}:{agent.__name__}", agent_deadline_s=seconds
        )
        generator = OpenAIAgent(settings)

        async def whole() -> list[Sample]:
            try:
                made = await generator(PROMPT, client or self._engine.client, seeds, context(self._tokenizer, **how))
                return list(made)
            finally:
                self.addresses = list(listened_on([os.getpid()]).values())
                self.metrics = {metric.name: metric.value for metric in generator.metrics()}
                self.warnings = generator.warnings()
                await generator.close()

        return self._engine.run(whole())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_words(tmp_path_factory.mktemp("words"))


@pytest.fixture
def runs(engine: Engine, tokenizer: Any) -> Iterator[Played]:
    yield Played(engine, tokenizer)


def test_a_conversation_is_one_sample_of_the_tokens_that_were_sampled(
    runs: Played, engine: Engine, models: Models, tokenizer: Any
) -> None:
    before = set(listened_on([os.getpid()]).values())
    samples = runs.play(agents.three_turns, [11, 12])
    assert beyond_loopback(runs.addresses) == [] and len(set(runs.addresses) - before) == 1, "the endpoint"
    assert len(samples) == 2
    assert all((s.num_turns, s.reward, s.status) == (3, Reward(5.0), Status.COMPLETED) for s in samples)
    check_samples(engine, models, PROMPT, samples)
    for sample in samples:
        text = tokenizer.decode(sample.token_ids.tolist())
        again = tokenize(tokenizer, [text])[0]
        assert len(again) > len(sample.token_ids), "the model wrote words that its tokenizer never writes"
        assert text.count("<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n") == 2
    assert runs.metrics["agent/calls"] == 6
    assert runs.metrics["agent/further_samples"] == runs.metrics["agent/failures"] == 0
    (warning,) = runs.warnings  # one, whatever else is asked for later
    assert "temperature=0.2" in warning and "temperature=0.7" in warning
    assert all(any(entry.matches(name) for entry in ENTRIES) for name in runs.metrics)


def test_the_client_hears_what_is_recorded(runs: Played, tokenizer: Any) -> None:
    (sample,) = runs.play(agents.three_turns, [11])
    spans = [span for span in sample.spans if span.source is Source.MODEL]
    assert [span.version for span in spans] == [runs._engine.run(runs._engine.client.version())] * 3
    *replies, (text, usage) = agents.heard
    for reply, span in zip(replies, spans, strict=False):
        ids, logprobs = sample.token_ids[span.start : span.stop].tolist(), sample.logprobs[span.start : span.stop]
        choice = reply.choices[0]
        assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert [entry.token for entry in choice.logprobs.content] == [tokenizer.decode([i]) for i in ids]
        np.testing.assert_allclose([entry.logprob for entry in choice.logprobs.content], logprobs, rtol=1e-6)
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (span.start, len(ids))
        assert choice.finish_reason == "length"
    last = sample.token_ids[spans[2].start :].tolist()
    assert (text, usage.prompt_tokens) == (tokenizer.decode(last, skip_special_tokens=True), spans[2].start)
    assert sample.text == text


def test_what_does_not_go_on_begins_a_sample_and_nothing_is_trained_on_twice(
    runs: Played, engine: Engine, models: Models
) -> None:
    samples = runs.play(agents.beside_each_other, [21])
    check_samples(engine, models, PROMPT, samples)
    assert len(samples) == 3
    main, beside, rewritten = samples
    assert {s.episode_id for s in samples} == {main.sample_id}
    assert len({s.sample_id for s in samples}) == 3
    assert [s.num_turns for s in samples] in ([3, 1, 1], [2, 2, 1]), "either of the two came first"
    shared = next(span.stop for span in main.spans if span.source is Source.MODEL)
    np.testing.assert_array_equal(beside.token_ids[:shared], main.token_ids[:shared])
    assert not by_model(beside)[:shared].any(), "trained on in the first sample"
    assert main.reward is None and beside.text == main.text == rewritten.text
    assert runs.metrics["agent/further_samples"] == 2


def test_tool_calls_are_heard_as_such_and_their_answers_are_not_trained_on(
    engine: Engine, models: Models, tmp_path: Path
) -> None:
    """The model is random: a token that it samples is given the text of a call."""
    seed, plain = 71, write_words(tmp_path / "plain")
    first = Played(engine, plain).play(agents.with_a_tool, [seed])[0]
    start = first.num_prompt_tokens
    sampled = first.token_ids[start : start + 8].tolist()
    call = ' <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    named = next(i for i in sampled if plain.decode([i]).startswith("w"))  # no token of the prompt changes
    tokenizer = write_words(tmp_path / "named", {call: named})
    (sample,) = Played(engine, tokenizer).play(agents.with_a_tool, [seed])
    (reason, message), _ = agents.heard
    assert reason in ("tool_calls", "length")
    assert {(c.function.name, c.function.arguments) for c in message.tool_calls} == {("add", '{"a": 1, "b": 2}')}
    assert sample.token_ids[start : start + 8].tolist() == sampled
    between = next(span for span in sample.spans if span.source is Source.TOOL)
    text = tokenizer.decode(sample.token_ids[between.start : between.stop].tolist())
    assert "<|im_start|>tool\n3<|im_end|>\n" in text and "<tool_call>" not in text
    assert sample.num_turns == 2, "the call that came back was known"
    check_samples(engine, models, PROMPT, [sample])


def test_the_example_agent_calculates(engine: Engine, models: Models, tmp_path: Path) -> None:
    """The model is random: two tokens that it samples one after the other are given the texts of a call."""
    plain = write_words(tmp_path / "plain", {"</calc>": 499})
    sampled = Played(engine, plain).play(calculator_agent.agent, list(range(16)))
    start = sampled[0].num_prompt_tokens
    firsts = [sample.token_ids[start : start + 2].tolist() for sample in sampled]
    seed, (asked, end) = next(
        (seed, ids)
        for seed, ids in enumerate(firsts)
        if ids[0] != ids[1] and all(plain.decode([i]).startswith("w") for i in ids)  # no token of the prompt changes
    )
    names = {"7+5": asked, "</calc>": end, "<result>": 497, "</result>": 498}
    tokenizer = write_words(tmp_path / "named", names)
    (sample,) = Played(engine, tokenizer).play(calculator_agent.agent, [seed], longest=120)
    assert [span.source for span in sample.spans][:4] == [Source.PROMPT, Source.MODEL, Source.TOOL, Source.MODEL]
    called, told = sample.spans[1:3]
    assert sample.token_ids[called.start : called.stop].tolist() == [asked, end]
    assert "tool\n<result>12</result>" in tokenizer.decode(sample.token_ids[told.start : told.stop].tolist())
    assert sample.num_turns >= 2 and sample.reward is None, "reward.name scores it"
    check_samples(engine, models, PROMPT, [sample])


def test_mistakes_are_told_in_openais_format_and_leave_no_trace(runs: Played) -> None:
    (sample,) = runs.play(agents.mistakes, [31])
    assert sample.num_turns == 1 and sample.num_response_tokens == 3
    *bad, missing, stranger = agents.heard
    assert {(status, kind) for status, _, _, kind in bad} == {(400, "invalid_request_error")}
    assert [param for _, param, _, _ in bad] == [
        "n",
        "messages",
        "messages[0].role",
        "messages[0].content",
        "stop",
        "max_tokens",
        "presence_penalty",
        "surprise",
        "chat_template_kwargs",
        "messages",
    ]
    assert bad[-1][2] == "context_length_exceeded"
    assert missing[0] == "NotFoundError" and "/v1/completions" in missing[1]["message"]
    assert stranger[0] == "AuthenticationError" and stranger[1]["code"] == "invalid_api_key"


def test_without_room_a_sample_is_truncated(runs: Played, engine: Engine, models: Models) -> None:
    (sample,) = runs.play(agents.too_long, [41], tokens=50)
    assert sample.status is Status.TRUNCATED
    assert sample.num_response_tokens == 50
    check_samples(engine, models, PROMPT, [sample])
    assert runs.metrics["agent/failures"] == 0


def test_an_agent_that_went_on_after_that_may_still_fail(runs: Played) -> None:
    (sample,) = runs.play(agents.starts_again, [42])
    assert agents.heard == ["context_length_exceeded"]
    assert (sample.status, runs.metrics["agent/failures"]) == (Status.FAILED, 1)
    assert "LookupError: lost" in runs.warnings[0]


def test_late_and_broken_agents_fail_their_samples_and_are_told(runs: Played) -> None:
    (late,) = runs.play(agents.hangs, [51], seconds=0.5)
    assert late.status is Status.FAILED
    assert runs.metrics["agent/timeouts"] == 1
    assert "rollout.agent_deadline_s=0.5" in runs.warnings[0]
    broken = runs.play(agents.raises, [52, 53])
    assert [s.status for s in broken] == [Status.FAILED] * 2
    assert runs.metrics["agent/failures"] == 2
    assert all(part in runs.warnings[0] for part in ("LookupError: no page about tell me", "agents.py:", "in raises"))


def test_agents_that_always_fail_end_the_run(runs: Played) -> None:
    with pytest.raises(AgentError, match=r"failed one after another.*LookupError"):
        runs.play(agents.raises, list(range(MAX_FIRST_FAILURES)))
    with pytest.raises(AgentError, match="returned 'good'"):
        runs.play(agents.no_number, [1])


def test_an_engine_that_fails_is_not_the_agents_fault(runs: Played, engine: Engine) -> None:
    gone = EngineClient("http://127.0.0.1:9", admin_key="", name="engine 7", deadline_s=5)
    with pytest.raises(EngineError, match="engine 7"):
        runs.play(agents.three_turns, [61], client=gone)
    engine.run(gone.close())


@pytest.mark.parametrize(
    ("name", "why"), [("blocks", "not a coroutine function"), ("two_arguments", "cannot be called as")]
)
def test_an_agent_of_another_shape_is_refused_at_load(name: str, why: str) -> None:
    config = RolloutConfig(generate="openai_agent", agent=f"tests.engine.agents:{name}")
    with pytest.raises(ConfigError, match=rf"rollout\.agent=.*{why}"):
        OpenAIAgent(config)
