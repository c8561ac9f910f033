"""Parse chat completion requests, and refuse invalid ones in OpenAI's error format.

Settings that change the sampling distribution (penalties, several choices, grammars) are refused, because the trainer
computes log-probabilities under the unchanged distribution. ``temperature`` and ``top_p`` are read, but the session samples
with the run's values, and warns if they differ. The settings in ``IGNORED`` are dropped. Unknown fields are refused, as OpenAI
does.
Source of names and error codes: OpenAI's API reference, chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PositiveInt, ValidationError
from pydantic_core import from_json

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
"""Map from a field to the values that have no effect. Any other value is rejected."""


class ApiError(Exception):
    """An error in OpenAI's format: HTTP ``status``, the ``param`` it concerns, and a machine-readable ``code``."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of the reply."""
        kind = {401: "authentication_error", 500: "server_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Ignored = Annotated[JsonValue, Field(exclude=True)]
"""Field of an assistant message that clients send back but chat templates do not read."""


def _join(content: JsonValue) -> JsonValue:
    """Return a message's content, with null as empty text and a list of text parts joined.

    Raises ``ValueError`` if a part is not text.
    """
    if not isinstance(content, list):
        return "" if content is None else content
    texts: list[str] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError("a part is not text; this server supports only text")
    return "".join(texts)


def _parse(arguments: JsonValue) -> JsonValue:
    """Return a tool call's arguments, parsed if they are JSON text, since templates serialize objects themselves.

    Invalid JSON is left as text; null becomes an empty object.
    """
    try:
        value: JsonValue = from_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return {} if value is None else value


class FunctionCall(_Model):
    """Name and arguments of a tool call."""

    name: str
    arguments: Annotated[JsonValue, BeforeValidator(_parse)] = Field(default_factory=dict[str, JsonValue])


class ToolCall(_Model):
    """A tool call of an assistant message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class Message(_Model):
    """A message, with its content as text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join)] = ""
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    annotations: Ignored = None
    audio: Ignored = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None
    refusal: Ignored = None

    def for_template(self) -> dict[str, JsonValue]:
        """Return the message for a chat template.

        ``Ignored`` fields, fields that are None and empty tool calls are omitted; role developer becomes system.
        """
        fields = self.model_dump(exclude_none=True, exclude=None if self.tool_calls else {"tool_calls"})
        return {**fields, "role": "system" if self.role == "developer" else self.role}

    def identity(self) -> str:
        """Return a key that is equal for equal messages. Outer whitespace of the content is ignored, since clients strip it."""
        return json.dumps({**self.for_template(), "content": self.content.strip()}, sort_keys=True)


class FunctionSchema(_Model):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(_Model):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSchema


class StreamOptions(_Model):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(_Model):
    """Fields of a chat completion request that this server reads."""

    messages: list[Message] = Field(min_length=1)
    model: str = "policy"
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, JsonValue] = {}
    max_completion_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    stop: Annotated[list[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    temperature: float | None = None
    top_p: float | None = None

    @property
    def max_sampled_tokens(self) -> int | None:
        """Maximum number of tokens to sample; None if the request sets none."""
        return self.max_completion_tokens or self.max_tokens


def parse_request(body: bytes) -> ChatRequest:
    """Parse a request.

    Raises ``ApiError`` with the cause if it is malformed or has an unsupported parameter. If the body is a JSON object, the
    error names the parameter.
    """
    try:
        json_value: JsonValue = from_json(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(json_value, dict):
        raise ApiError("the body is not a JSON object")
    fields = {name: value for name, value in json_value.items() if value is not None and name not in IGNORED}
    if fields.get("tool_choice") == "none":
        fields.pop("tools", None)
    for name, neutral_values in NEUTRAL.items():
        if name in fields and (value := fields.pop(name)) not in neutral_values:
            raise ApiError(
                f"{name}={json.dumps(value)[:80]} is not supported: training needs one choice per call, "
                f"sampled from the model's own distribution; leave it out",
                param=name,
            )
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    """Return the error to raise for the first invalid field."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "extra_forbidden":
        return ApiError(f"Unrecognized request argument supplied: {param}; leave it out", param=param)
    value = "" if first["type"] == "missing" else f"={json.dumps(first['input'])[:80]}"
    return ApiError(f"{param}{value}: {first['msg'].removeprefix('Value error, ')}", param=param)
