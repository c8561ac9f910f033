"""Agents with an openai client on a real engine: samples hold the sampled tokens, and errors have OpenAI's format."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.chat import tokenize
from slime_like.errors import AgentError, ConfigError, EngineError
from slime_like.metrics.dictionary import ENTRIES
from slime_like.rollout.agent.generate import MAX_FIRST_FAILURES, OpenAIAgent
from slime_like.rollout.engine.client import EngineClient
from slime_like.types import Prompt, Reward, Sample, Source, Status
from tests.e2e.leftovers import beyond_loopback, listened_on
from tests.engine import agents
from tests.engine.conftest import Models, RunningEngine
from tests.engine.masks import check_samples, sampled_mask
from tests.engine.words import context, write_words

pytestmark = pytest.mark.engine
PROMPT = Prompt(0, np.array([9, 9], np.int32), "tell me", "label", None, {"level": 3})


class AgentRuns:
    """Runs of one agent, with their metrics, warnings and listening addresses."""

    def __init__(self, engine: RunningEngine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.metrics: dict[str, float] = {}
        self.warnings: tuple[str, ...] = ()
        self.addresses: list[str] = []  # addresses on which this process listened, including the endpoint's

    def play(
        self,
        agent: Callable[..., Coroutine[Any, Any, Any]],
        seeds: list[int],
        *,
        client: Any = None,
        **context_args: Any,
    ) -> list[Sample]:
        agents.replies.clear()
        seconds = context_args.pop("seconds", 60.0)
        settings = RolloutConfig(
            generate="openai_agent", agent=f"{agent.__module__}:{agent.__name__}", agent_deadline_s=seconds
        )
        generator = OpenAIAgent(settings)

        async def generate() -> list[Sample]:
            try:
                samples = await generator(
                    PROMPT, client or self._engine.client, seeds, context(self._tokenizer, **context_args)
                )
                return list(samples)
            finally:
                self.addresses = list(listened_on([os.getpid()]).values())
                self.metrics = {metric.name: metric.value for metric in generator.metrics()}
                self.warnings = generator.warnings()
                await generator.close()

        return self._engine.run(generate())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_words(tmp_path_factory.mktemp("words"))


@pytest.fixture
def runs(engine: RunningEngine, tokenizer: Any) -> Iterator[AgentRuns]:
    yield AgentRuns(engine, tokenizer)


def test_a_conversation_is_one_sample_of_exactly_the_sampled_tokens(
    runs: AgentRuns, engine: RunningEngine, models: Models, tokenizer: Any
) -> None:
    addresses_before = set(listened_on([os.getpid()]).values())
    samples = runs.play(agents.three_turns, [11, 12])
    assert beyond_loopback(runs.addresses) == [] and len(set(runs.addresses) - addresses_before) == 1, "the endpoint"
    assert len(samples) == 2
    assert all((s.num_turns, s.reward, s.status) == (3, Reward(5.0), Status.COMPLETED) for s in samples)
    check_samples(engine, models, PROMPT, samples)
    for sample in samples:
        text = tokenizer.decode(sample.token_ids.tolist())
        retokenized = tokenize(tokenizer, [text])[0]
        assert len(retokenized) > len(sample.token_ids), "the model wrote words that its tokenizer never writes"
        assert text.count("<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n") == 2
    assert runs.metrics["agent/calls"] == 6
    assert runs.metrics["agent/further_samples"] == runs.metrics["agent/failures"] == 0
    (warning,) = runs.warnings  # only one, although later requests have other temperatures
    assert "temperature=0.2" in warning and "temperature=0.7" in warning
    assert all(any(entry.matches(name) for entry in ENTRIES) for name in runs.metrics)


def test_the_client_receives_what_is_recorded(runs: AgentRuns, tokenizer: Any) -> None:
    (sample,) = runs.play(agents.three_turns, [11])
    spans = [span for span in sample.spans if span.source is Source.MODEL]
    assert [span.version for span in spans] == [runs._engine.run(runs._engine.client.version())] * 3
    *replies, (text, usage) = agents.replies
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


def test_a_branch_or_rewritten_history_begins_a_sample_and_no_token_is_trained_on_twice(
    runs: AgentRuns, engine: RunningEngine, models: Models
) -> None:
    samples = runs.play(agents.branches, [21])
    check_samples(engine, models, PROMPT, samples)
    assert len(samples) == 3
    first, branch, rewritten = samples
    assert {s.episode_id for s in samples} == {first.sample_id}
    assert len({s.sample_id for s in samples}) == 3
    assert [s.num_turns for s in samples] in ([3, 1, 1], [2, 2, 1]), (
        "either of the two concurrent answers may come first"
    )
    shared = next(span.stop for span in first.spans if span.source is Source.MODEL)
    np.testing.assert_array_equal(branch.token_ids[:shared], first.token_ids[:shared])
    assert not sampled_mask(branch)[:shared].any(), "trained on in the first sample"
    assert first.reward is None and branch.text == first.text == rewritten.text
    assert runs.metrics["agent/further_samples"] == 2


def test_tool_calls_are_parsed_and_tool_results_are_not_trained_on(
    engine: RunningEngine, models: Models, tmp_path: Path
) -> None:
    """The model is random, so the tokenizer gives a sampled token the text of a tool call."""
    seed, plain_tokenizer = 71, write_words(tmp_path / "plain")
    first = AgentRuns(engine, plain_tokenizer).play(agents.use_tool, [seed])[0]
    start = first.num_prompt_tokens
    first_tokens = first.token_ids[start : start + 8].tolist()
    call = ' <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    token_id = next(
        i for i in first_tokens if plain_tokenizer.decode([i]).startswith("w")
    )  # a word, which no prompt contains
    tokenizer = write_words(tmp_path / "named", {call: token_id})
    (sample,) = AgentRuns(engine, tokenizer).play(agents.use_tool, [seed])
    (reason, message), _ = agents.replies
    assert reason in ("tool_calls", "length")
    assert {(c.function.name, c.function.arguments) for c in message.tool_calls} == {("add", '{"a": 1, "b": 2}')}
    assert sample.token_ids[start : start + 8].tolist() == first_tokens
    tool_span = next(span for span in sample.spans if span.source is Source.TOOL)
    text = tokenizer.decode(sample.token_ids[tool_span.start : tool_span.stop].tolist())
    assert "<|im_start|>tool\n3<|im_end|>\n" in text and "<tool_call>" not in text
    assert sample.num_turns == 2, "the call in the second request was recognised as the sampled one"
    check_samples(engine, models, PROMPT, [sample])


def test_the_example_agent_calculates(engine: RunningEngine, models: Models, tmp_path: Path) -> None:
    """The model is random, so the tokenizer gives three consecutive sampled tokens the text of a call."""
    from examples import (
        calculator_agent,
    )  # imports openai, which takes a second in each process that collects this file

    plain_tokenizer = write_words(tmp_path / "plain", {"</calc>": 499})
    plain_samples = AgentRuns(engine, plain_tokenizer).play(calculator_agent.agent, list(range(16)))
    start = plain_samples[0].num_prompt_tokens
    first_tokens = [sample.token_ids[start : start + 3].tolist() for sample in plain_samples]
    seed, call_ids = next(
        (seed, ids)
        for seed, ids in enumerate(first_tokens)
        if len(set(ids)) == 3
        and all(plain_tokenizer.decode([i]).startswith("w") for i in ids)  # no token of the prompt changes
    )
    names = dict(zip(("<calc>", "7+5", "</calc>"), call_ids, strict=True)) | {"<result>": 497, "</result>": 498}
    tokenizer = write_words(tmp_path / "named", names)
    (sample,) = AgentRuns(engine, tokenizer).play(calculator_agent.agent, [seed], max_len=120)
    assert [span.source for span in sample.spans][:4] == [Source.PROMPT, Source.MODEL, Source.TOOL, Source.MODEL]
    call_span, result_span = sample.spans[1:3]
    assert sample.token_ids[call_span.start : call_span.stop].tolist() == call_ids
    assert "tool\n<result>12</result>" in tokenizer.decode(
        sample.token_ids[result_span.start : result_span.stop].tolist()
    )
    assert sample.num_turns >= 2 and sample.reward is None, "reward.name scores it"
    check_samples(engine, models, PROMPT, [sample])


def test_invalid_requests_are_answered_in_openais_format_and_are_not_recorded(runs: AgentRuns) -> None:
    (sample,) = runs.play(agents.send_invalid_requests, [31])
    assert sample.num_turns == 1 and sample.num_response_tokens == 3
    *invalid, unknown_path, wrong_key = agents.replies
    assert {(status, kind) for status, _, _, kind in invalid} == {(400, "invalid_request_error")}
    assert [param for _, param, _, _ in invalid] == [
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
    assert invalid[-1][2] == "context_length_exceeded"
    assert unknown_path[0] == "NotFoundError" and "/v1/completions" in unknown_path[1]["message"]
    assert wrong_key[0] == "AuthenticationError" and wrong_key[1]["code"] == "invalid_api_key"


def test_a_conversation_that_fills_the_context_is_truncated(
    runs: AgentRuns, engine: RunningEngine, models: Models
) -> None:
    (sample,) = runs.play(agents.exceed_context, [41], tokens=50)
    assert sample.status is Status.TRUNCATED
    assert sample.num_response_tokens == 50
    check_samples(engine, models, PROMPT, [sample])
    assert runs.metrics["agent/failures"] == 0


def test_an_agent_that_fails_after_a_full_context_fails_its_sample(runs: AgentRuns) -> None:
    (sample,) = runs.play(agents.restart_after_overflow, [42])
    assert agents.replies == ["context_length_exceeded"]
    assert (sample.status, runs.metrics["agent/failures"]) == (Status.FAILED, 1)
    assert "LookupError: lost" in runs.warnings[0]


def test_agents_that_hang_or_raise_fail_their_samples_and_are_reported(runs: AgentRuns) -> None:
    (timed_out,) = runs.play(agents.hang, [51], seconds=0.5)
    assert timed_out.status is Status.FAILED
    assert runs.metrics["agent/timeouts"] == 1
    assert "rollout.agent_deadline_s=0.5" in runs.warnings[0]
    failed_samples = runs.play(agents.raise_error, [52, 53])
    assert [s.status for s in failed_samples] == [Status.FAILED] * 2
    assert runs.metrics["agent/failures"] == 2
    assert all(
        part in runs.warnings[0] for part in ("LookupError: no page about tell me", "agents.py:", "in raise_error")
    )


def test_agents_that_always_fail_end_the_run(runs: AgentRuns) -> None:
    with pytest.raises(AgentError, match=r"failed one after another.*LookupError"):
        runs.play(agents.raise_error, list(range(MAX_FIRST_FAILURES)))
    with pytest.raises(AgentError, match="returned 'good'"):
        runs.play(agents.return_text, [1])


def test_an_engine_failure_is_not_reported_as_the_agents(runs: AgentRuns, engine: RunningEngine) -> None:
    lost_engine = EngineClient("http://127.0.0.1:9", admin_key="", name="engine 7", deadline_s=5)
    with pytest.raises(EngineError, match="engine 7"):
        runs.play(agents.three_turns, [61], client=lost_engine)
    engine.run(lost_engine.close())


@pytest.mark.parametrize(
    ("name", "reason"), [("blocks", "not a coroutine function"), ("two_arguments", "cannot be called as")]
)
def test_an_agent_with_a_wrong_signature_is_refused_at_load(name: str, reason: str) -> None:
    config = RolloutConfig(generate="openai_agent", agent=f"tests.engine.agents:{name}")
    with pytest.raises(ConfigError, match=rf"rollout\.agent=.*{reason}"):
        OpenAIAgent(config)
