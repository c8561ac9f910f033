"""Parsing of chat completion requests; refusals use OpenAI's error format.

Settings that would sample from another distribution than the trainer computes (penalties, several choices, grammars) are
refused; settings unrelated to sampling are ignored; an unknown field is refused, as OpenAI does.
Source of names and error codes: OpenAI's API reference, chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED = frozenset(
    [
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    ]
)
READ = frozenset(
    [
        "chat_template_kwargs",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "presence_penalty",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
    ]
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Field -> values without effect; others are refused."""


class ApiError(Exception):
    """A refusal in OpenAI's error format: HTTP ``status``, the ``param`` it concerns, and a machine-readable ``code``."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON body of the reply."""
        kind = {401: "authentication_error", 500: "server_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call. ``messages`` are ready for a chat template: contents as text, arguments of tool calls as objects."""

    messages: tuple[Message, ...]
    model: str = "policy"
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    temperature: float | None = None
    top_p: float | None = None


def parse_request(body: bytes) -> ChatRequest:
    """Parse a request. Raises ``ApiError`` naming the unsupported parameter and the cause."""
    try:
        parsed = json.loads(body)
        json.dumps(parsed, ensure_ascii=False).encode()  # JSON accepts a lone surrogate, tokenizers do not
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON text: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError("the body is not a JSON object")
    fields = {name: value for name, value in cast("dict[str, Any]", parsed).items() if value is not None}
    for name in sorted(fields.keys() - IGNORED - READ):
        raise ApiError(f"Unrecognized request argument supplied: {name}", param=name)
    for name, allowed in NEUTRAL.items():
        if name in fields and fields[name] not in allowed:
            raise ApiError(
                f"{name}={json.dumps(fields[name])[:80]} is not served here: what is trained on is sampled from the "
                f"model's own distribution, one choice per call; leave it out",
                param=name,
            )
    options = _typed(fields, "stream_options", dict, {})
    stop = _typed(fields, "stop", (str, list), [])
    return ChatRequest(
        messages=read_messages(fields.get("messages")),
        model=_typed(fields, "model", str, "policy"),
        tools=_tools(fields),
        template_kwargs=_typed(fields, "chat_template_kwargs", dict, {}),
        max_tokens=_limit(fields),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        stream=_typed(fields, "stream", bool, False),
        include_usage=options.get("include_usage") is True,
        logprobs=_typed(fields, "logprobs", bool, False),
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
    )


def read_messages(value: object) -> tuple[Message, ...]:
    """Return the conversation, each message reduced to the fields that a chat template reads. Raises ``ApiError``."""
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list of at least one message", param="messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(cast("list[object]", value)))


def identity(message: Message) -> str:
    """Return a key that is equal for equal messages; clients strip outer whitespace, so it is ignored."""
    return json.dumps({**message, "content": str(message["content"]).strip()}, sort_keys=True)


def _message(item: object, path: str) -> Message:
    if not isinstance(item, dict):
        raise ApiError(f"{path} is not an object", param=path)
    fields = cast("dict[str, Any]", item)
    role = fields.get("role")
    if role not in ROLES:
        raise ApiError(f"{path}.role={role!r} is not one of {', '.join(ROLES)}", param=f"{path}.role")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(fields.get("content"), f"{path}.content"),
    }
    calls = fields.get("tool_calls") if role == "assistant" else None
    if calls:
        listed = cast("list[object]", calls if isinstance(calls, list) else [calls])
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls") for call in listed]
    for name in ("name", "tool_call_id"):
        if fields.get(name) is not None:
            message[name] = str(fields[name])
    return message


def _text(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast("list[Any]", content if isinstance(content, list) else [content]):
        text = (
            cast("dict[str, Any]", part).get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            raise ApiError(f"{path} holds a part that is not text; only text is served here", param=path)
        texts.append(text)
    return "".join(texts)


def _tool_call(call: object, path: str) -> dict[str, Any]:
    try:
        fields = cast("dict[str, Any]", call)
        name, arguments = fields["function"]["name"], fields["function"].get("arguments", "{}")
        return {
            "id": str(fields.get("id", "")),
            "type": "function",
            "function": {"name": str(name), "arguments": _object(arguments)},
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ApiError(f"{path} holds a call without function and name", param=path) from error


def _object(arguments: object) -> object:
    """Return JSON arguments as an object if they parse: templates serialize them themselves."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = cast("list[object]", _typed(fields, "tools", list, []))
    if not all(isinstance(tool, dict) for tool in tools):
        raise ApiError("tools must be a list of objects", param="tools")
    return () if fields.get("tool_choice") == "none" else tuple(cast("list[dict[str, Any]]", tools))


def _limit(fields: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _typed(fields, name, int, None)
        if value is not None and value < 1:
            raise ApiError(f"{name}={value} must be at least 1", param=name)
        if value is not None:
            return value
    return None


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = _typed(fields, name, (int, float), None)
    try:
        return None if value is None else float(value)
    except OverflowError as error:
        raise ApiError(f"{name} is too large a number", param=name) from error


def _typed(fields: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = fields.get(name, default)
    allowed: Sequence[type] = kinds if isinstance(kinds, tuple) else (kinds,)
    if name in fields and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in allowed)):
        raise ApiError(f"{name}={json.dumps(value)[:80]} is of the wrong type", param=name)
    return value
