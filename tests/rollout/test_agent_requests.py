"""Parsing of chat requests and of tool calls in model output."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.errors import ConfigError
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.requests import NEUTRAL, ApiError, Message, parse_request
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
    request = parse_request(
        body(max_completion_tokens=7, stop="x", stream=True, stream_options={"include_usage": True})
    )
    assert (request.max_sampled_tokens, request.stop, request.stream) == (7, ["x"], True)
    assert request.stream_options.include_usage
    request = parse_request(
        body(user="me", seed=3, max_tokens=None, tools=[{"a": 1}], tool_choice="none", **_neutral())
    )
    assert (request.max_sampled_tokens, request.tools) == (None, [])


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
    ("first", "second"),
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
def test_equivalent_messages_have_one_identity(first: Any, second: Any) -> None:
    assert Message(**first).identity() == Message(**second).identity()


@pytest.mark.parametrize(
    "different",
    [{"role": "assistant", "content": "no"}, {"role": "user", "content": "yes"}, {"role": "tool", "content": "yes"}],
)
def test_different_messages_have_different_identities(different: Any) -> None:
    assert Message(role="assistant", content="yes").identity() != Message(**different).identity()


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_too_large_for_a_float_are_refused(name: str) -> None:
    with pytest.raises(ApiError, match=name):
        parse_request(body(**{name: 10**400}))


def test_deeply_nested_arguments_stay_text() -> None:
    text = "[" * 200_000
    deep = {**CALL, "function": {"name": "add", "arguments": text}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [deep]})
    assert message.tool_calls and message.tool_calls[0].function.arguments == text


def test_reserved_chat_template_arguments_are_refused() -> None:
    request = parse_request(body(chat_template_kwargs={"tokenize": True}))
    with pytest.raises(ApiError, match=r"chat_template_kwargs\.tokenize"):
        Renderer(characters(), {}).conversation(request)


def test_a_template_that_changes_answers_is_refused_with_its_folder() -> None:
    tokenizer = characters(template="{% for message in messages %}{{ message['content'] | title }}{% endfor %}")
    request = parse_request(body(messages=[USER, {"role": "assistant", "content": "yes"}, USER]))
    with pytest.raises(ConfigError, match=r"tokenizer in '/models/tiny' changes the content of an assistant message"):
        Renderer(tokenizer, {}).after_answer(request, 1)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ApiError, match="the body is not JSON"):
        parse_request(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def test_tool_calls_are_extracted_from_the_text() -> None:
    first_call, second_call = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}'
    parsed_calls = find_calls(
        f"let me see <tool_call>\n{first_call}\n</tool_call>\n<tool_call>{second_call}</tool_call>"
    )
    assert (parsed_calls.content, parsed_calls.calls) == ("let me see", (("add", '{"a": 1}'), ("now", "{}")))


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
def test_malformed_tool_calls_stay_text(text: str) -> None:
    assert find_calls(text).content == text and not find_calls(text).calls


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"surprise": 1}, "surprise", "leave it out"),
        ({"messages": [{**USER, "colour": 1}]}, "messages[0].colour", "leave it out"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "=3: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        ({"messages": [{"role": "oracle"}]}, "messages[0].role", "should be 'system', 'developer', 'user'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "Field required"),
        ({"max_tokens": True}, "max_tokens", "=true: Input should be a valid integer"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "=0: Input should be greater than 0"),
    ],
)
def test_a_refusal_names_field_value_and_fix(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError, match=re.escape(reason)) as refusal:
        parse_request(body(**fields))
    assert refusal.value.param == param and param in str(refusal.value)


def test_messages_and_tools_reach_the_template_as_they_were_sent() -> None:
    call = {**CALL, "function": {"name": "add", "arguments": '{"a": null}'}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"z": None, "a": 1}}}
    request = parse_request(body(messages=history, tools=[tool]))
    answer = {**CALL, "function": {"name": "add", "arguments": {"a": None}}}
    assert [message.for_template() for message in request.messages] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [answer]},
    ]
    assert json.dumps([tool.model_dump(exclude_unset=True) for tool in request.tools]) == json.dumps([tool])
