"""Calls of the calculator by the agent of ``examples.calculator_agent``, with a fake client."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from examples import calculator_agent

SUM = ("<calc>", "1", "+", "2", "</calc>")


def play(answers: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Run the agent with a model that samples these tokens per answer, the last of them again and again.

    Return the messages of each request.
    """
    requests: list[list[Any]] = []

    async def create(messages: list[Any], stop: str, logprobs: bool, **_: object) -> Any:
        assert stop == "</calc>" and logprobs
        tokens = answers[min(len(requests), len(answers) - 1)]
        requests.append([*messages])
        choice = SimpleNamespace(
            message=SimpleNamespace(content=re.sub("</?calc>", "", "".join(tokens))),
            logprobs=SimpleNamespace(content=[SimpleNamespace(token=token) for token in tokens]),
        )
        return SimpleNamespace(choices=[choice])

    class FakeClient:
        """Client whose model gives ``answers``."""

        def __init__(self, **_: object) -> None:
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))

        async def __aenter__(self) -> FakeClient:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(openai, "AsyncOpenAI", FakeClient)
    asyncio.run(calculator_agent.agent("http://127.0.0.1:1", "key", "1+2?", {}))
    return requests


def results(messages: list[Any]) -> list[str]:
    return [message["content"] for message in messages if isinstance(message, dict) and message["role"] == "tool"]


@pytest.mark.parametrize(("num_calls", "num_requests", "num_results"), [(0, 1, 0), (2, 3, 2), (4, 5, 4), (9, 5, 4)])
def test_a_result_is_computed_only_for_a_further_request(
    num_calls: int, num_requests: int, num_results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []

    def record_result(expression: str) -> str:
        computed.append(expression)
        return stock_result(expression)

    stock_result = calculator_agent.result
    monkeypatch.setattr(calculator_agent, "result", record_result)
    requests = play([*[SUM] * num_calls, ("3",)], monkeypatch)
    assert (len(requests), computed) == (num_requests, ["1+2"] * num_results)
    assert results(requests[-1]) == ["<result>3</result>"] * num_results


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("<calc>", "2", "*", "3", "</calc>"), ["<result>6</result>"]),
        (("Then ", "<calc>", "1", "/", "8", "</calc>"), ["<result>0.125</result>"]),
        (("<calc>", "7", "<calc>", "(1-4)", "</calc>"), ["<result>-3</result>"]),
        (("<calc>", "2", "+", "</calc>"), ["<result>error</result>"]),
        (("<calc>", "</calc>"), ["<result>error</result>"]),
        (("1", "+", "2", " is ", "3"), []),
        (("1", "+", "2", "</calc>"), []),
        (("<calc>", "1", "+", "2"), []),
        (("<calc>", "1+2", "</calc>", " is 3"), []),
        ((), []),
    ],
)
def test_a_call_is_what_the_marks_at_the_end_of_an_answer_enclose(
    tokens: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results(play([tokens, ("3",)], monkeypatch)[-1]) == expected
