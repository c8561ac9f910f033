"""Agents as users have them: a stock client that does not know it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import openai

heard: list[Any] = []  # what the agents of a test were told, in order


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key)


async def three_turns(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> float:
    """A conversation that grows, the last turn streamed."""
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for limit, temperature in ((9, 0.2), (12, 0.3)):
            reply = await api.chat.completions.create(
                model="any", messages=messages, max_tokens=limit, logprobs=True, temperature=temperature
            )
            heard.append(reply)
            messages += [reply.choices[0].message, {"role": "user", "content": "and then?"}]
        text, usage = "", None
        async for chunk in await api.chat.completions.create(
            model="any", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        heard.append((text, usage))
        return float(len(metadata["label"]))


async def beside_each_other(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Two answers to one history, one that goes on, one history rewritten."""
    async with client(base_url, api_key) as api:

        async def ask(*messages: Any) -> Any:
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=6)
            return reply.choices[0].message

        first = {"role": "user", "content": prompt}
        answer = await ask(first)
        more = {"role": "user", "content": "more"}
        left, _ = await asyncio.gather(ask(first, answer, more), ask(first, answer, more))
        await ask(first, answer, more, left, more)
        await ask(first, {"role": "assistant", "content": "what it never said"}, more)


async def with_a_tool(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Answers calls of its one tool until there is none."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(2):
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=8, tools=[tool])
            message = reply.choices[0].message
            heard.append((reply.choices[0].finish_reason, message))
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})


async def mistakes(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Everything that a client can get wrong, then nothing."""
    good: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": prompt}], "max_tokens": 3}
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with client(base_url, api_key) as api:
        wrongs: list[dict[str, Any]] = [
            {"n": 2},
            {"messages": []},
            {"messages": [{"role": "oracle", "content": "x"}]},
            {"messages": [{"role": "user", "content": image}]},
            {"stop": "two"},
            {"max_tokens": 0},
            {"presence_penalty": 0.5},
            {"extra_body": {"surprise": 1}},
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            {"messages": [{"role": "user", "content": "x" * 500}]},
        ]
        for wrong in wrongs:
            asked: dict[str, Any] = {**good, **wrong}
            try:
                await api.chat.completions.create(**asked)
            except openai.BadRequestError as error:
                heard.append((error.status_code, error.param, error.code, error.type))
        for call in (
            api.completions.create(model="any", prompt="x"),
            api.with_options(api_key="another").models.list(),
        ):
            try:
                await call
            except openai.APIStatusError as error:
                heard.append((type(error).__name__, error.body))
        await api.chat.completions.create(**good)


async def too_long(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Goes on until there is no room, and does not look for that."""
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        while True:
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=20)
            messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]


async def starts_again(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Forgets what there is no room for, goes on, and fails of something else."""
    async with client(base_url, api_key) as api:
        for content in ("x" * 500, prompt):
            try:
                await api.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": content}], max_tokens=3
                )
            except openai.BadRequestError as error:
                heard.append(error.code)
    raise LookupError("lost")


async def hangs(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Asks once, then waits for what never comes."""
    async with client(base_url, api_key) as api:
        await api.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}], max_tokens=3)
    await asyncio.Event().wait()


async def raises(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """A fault of its own."""
    raise LookupError(f"no page about {prompt}")


async def no_number(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> Any:
    """A reward that is none."""
    return "good"


def blocks(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Not a coroutine function."""


async def two_arguments(base_url: str, api_key: str) -> None:
    """Agent with a wrong signature."""
