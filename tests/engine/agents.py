"""Agents as users write them: an unmodified openai client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

replies: list[Any] = []  # replies and errors that the agents of a test received, in order


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    import openai  # takes a second

    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key)


async def three_turns(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> float:
    """Have a conversation of three turns, the last of them streamed."""
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for limit, temperature in ((9, 0.2), (12, 0.3)):
            reply = await api.chat.completions.create(
                model="any", messages=messages, max_tokens=limit, logprobs=True, temperature=temperature
            )
            replies.append(reply)
            messages += [reply.choices[0].message, {"role": "user", "content": "and then?"}]
        text, usage = "", None
        async for chunk in await api.chat.completions.create(
            model="any", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        replies.append((text, usage))
        return float(len(metadata["label"]))


async def branches(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Request two answers to one history, continue one of them, and rewrite the history."""
    async with client(base_url, api_key) as api:

        async def ask(*messages: Any) -> Any:
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=6)
            return reply.choices[0].message

        first = {"role": "user", "content": prompt}
        answer = await ask(first)
        follow_up = {"role": "user", "content": "more"}
        answer_to_branch, _ = await asyncio.gather(ask(first, answer, follow_up), ask(first, answer, follow_up))
        await ask(first, answer, follow_up, answer_to_branch, follow_up)
        await ask(first, {"role": "assistant", "content": "what it never said"}, follow_up)


async def use_tool(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Answer the calls of a tool for two turns."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(2):
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=8, tools=[tool])
            message = reply.choices[0].message
            replies.append((reply.choices[0].finish_reason, message))
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})


async def send_invalid_requests(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Send every kind of invalid request, then a valid one."""
    import openai

    valid: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": prompt}], "max_tokens": 3}
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with client(base_url, api_key) as api:
        changes: list[dict[str, Any]] = [
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
        for change in changes:
            arguments: dict[str, Any] = {**valid, **change}
            try:
                await api.chat.completions.create(**arguments)
            except openai.BadRequestError as error:
                replies.append((error.status_code, error.param, error.code, error.type))
        for call in (
            api.completions.create(model="any", prompt="x"),
            api.with_options(api_key="another").models.list(),
        ):
            try:
                await call
            except openai.APIStatusError as error:
                replies.append((type(error).__name__, error.body))
        await api.chat.completions.create(**valid)


async def exceed_context(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Continue the conversation until the context is full, without handling the error."""
    async with client(base_url, api_key) as api:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        while True:
            reply = await api.chat.completions.create(model="any", messages=messages, max_tokens=20)
            messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]


async def restart_after_overflow(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Fill the context, start another conversation, then raise."""
    import openai

    async with client(base_url, api_key) as api:
        for content in ("x" * 500, prompt):
            try:
                await api.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": content}], max_tokens=3
                )
            except openai.BadRequestError as error:
                replies.append(error.code)
    raise LookupError("lost")


async def hang(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Send one request, then wait forever."""
    async with client(base_url, api_key) as api:
        await api.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}], max_tokens=3)
    await asyncio.Event().wait()


async def raise_error(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Raise an exception."""
    raise LookupError(f"no page about {prompt}")


async def return_text(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> Any:
    """Return a reward that is not a number."""
    return "good"


def blocks(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Agent that is not a coroutine function."""


async def two_arguments(base_url: str, api_key: str) -> None:
    """Agent with a wrong signature."""
