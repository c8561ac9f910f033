"""Chat requests as clients send them, tool calls as models write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.requests import NEUTRAL, ApiError, identity, parse_request, read_messages
from slime_like.rollout.agent.tool_calls import find_calls
from tests.data.character_tokenizer import characters

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def test_fields_are_read() -> None:
    found = parse_request(body(max_completion_tokens=7, stop="x", stream=True, stream_options={"include_usage": True}))
    assert (found.max_tokens, found.stop, found.stream, found.include_usage) == (7, ("x",), True, True)
    found = parse_request(body(user="me", seed=3, max_tokens=None, tools=[{"a": 1}], tool_choice="none", **_neutral()))
    assert (found.max_tokens, found.tools) == (None, ())


def _neutral() -> dict[str, Any]:
    return {name: values[0] for name, values in NEUTRAL.items() if name != "tool_choice"}


@given(st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_body_is_read_or_refused(content: bytes) -> None:
    try:
        parse_request(content)
    except ApiError as error:
        assert error.body["error"]["message"]


NAMES = st.sampled_from(["n", "stop", "tools", "stream", "max_tokens", "stream_options", "temperature", "logprobs"])


@given(
    st.dictionaries(NAMES, JSON), st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON))
)
def test_any_field_is_read_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    try:
        parse_request(json.dumps({"messages": [USER, *messages], **fields}).encode())
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize(
    ("sent", "again"),
    [
        (
            {"role": "assistant", "content": "yes\n"},
            {"role": "assistant", "content": [{"type": "text", "text": " yes"}]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "refusal": None, "audio": None, "tool_calls": [{**CALL, "index": 0}]},
        ),
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief", "name": None}),
    ],
)
def test_messages_that_are_the_same(sent: Any, again: Any) -> None:
    assert identity(read_messages([sent])[0]) == identity(read_messages([again])[0])


@pytest.mark.parametrize(
    "other",
    [{"role": "assistant", "content": "no"}, {"role": "user", "content": "yes"}, {"role": "tool", "content": "yes"}],
)
def test_messages_that_are_not(other: Any) -> None:
    assert identity(read_messages([{"role": "assistant", "content": "yes"}])[0]) != identity(read_messages([other])[0])


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_beyond_a_float_are_refused(name: str) -> None:
    with pytest.raises(ApiError, match=name):
        parse_request(body(**{name: 10**400}))


def test_arguments_nested_too_deep_stay_text() -> None:
    text = "[" * 200_000
    deep = {**CALL, "function": {"name": "add", "arguments": text}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [deep]}])
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_arguments_of_the_templates_rendering_are_refused() -> None:
    request = parse_request(body(chat_template_kwargs={"tokenize": True}))
    with pytest.raises(ApiError, match=r"chat_template_kwargs\.tokenize"):
        Renderer(characters(), {}).conversation(request)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ApiError, match="no JSON text"):
        parse_request(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def test_calls_are_taken_out_of_the_text() -> None:
    one, two = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}'
    found = find_calls(f"let me see <tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call>")
    assert (found.content, found.calls) == ("let me see", (("add", '{"a": 1}'), ("now", "{}")))


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "a"}</tool_call><tool_call>oops</tool_call>',
        "<tool_call>" + "\n" * 4000,
        "<tool_call>" * 4000,
        "<tool_call>" * 4000 + "</tool_call>" + "<tool_call>" * 4000,
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert find_calls(text).content == text and not find_calls(text).calls
