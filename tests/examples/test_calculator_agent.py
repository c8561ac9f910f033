"""Calls of the calculator by the agent of ``examples.calculator_agent``, with a fake client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from examples import calculator_agent


@pytest.mark.parametrize(("num_sums", "num_requests", "num_results"), [(0, 1, 0), (2, 3, 2), (4, 5, 4), (9, 5, 4)])
def test_a_result_is_computed_only_for_a_further_request(
    num_sums: int, num_requests: int, num_results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[list[Any]] = []
    results: list[str] = []

    async def create(messages: list[Any], **_: object) -> Any:
        requests.append([*messages])
        content = "1+2" if len(requests) <= num_sums else "3"
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))])

    class SumClient:
        """Client whose model asks for ``num_sums`` sums and then answers."""

        def __init__(self, **_: object) -> None:
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))

        async def __aenter__(self) -> SumClient:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

    def record_result(expression: str) -> str:
        results.append(expression)
        return stock_result(expression)

    stock_result = calculator_agent.result
    monkeypatch.setattr(openai, "AsyncOpenAI", SumClient)
    monkeypatch.setattr(calculator_agent, "result", record_result)
    asyncio.run(calculator_agent.agent("http://127.0.0.1:1", "key", "1+2?", {}))
    assert (len(requests), results) == (num_requests, ["1+2"] * num_results)
    assert sum(isinstance(message, dict) and message["role"] == "tool" for message in requests[-1]) == num_results
