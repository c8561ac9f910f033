"""Tool calls in a model's text: one JSON object each, between ``<tool_call>`` and ``</tool_call>``.

This is the format of Hermes' and Qwen's chat templates. Text in another format is left unchanged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Text of an answer before its first call (all text if there is no call), and the calls as (name, arguments as JSON text)."""

    content: str
    calls: tuple[tuple[str, str], ...]


def find_calls(text: str) -> ParsedAnswer:
    """Parse the calls in ``text``.

    Example: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`` is the call ``("add", '{"a": 1}')``. Arguments
    that are already text are left unchanged, and missing ones become ``{}``. If there is no call, or any call is invalid, the
    entire text is returned as content; otherwise, text after the first call is dropped.
    """
    calls: list[tuple[str, str]] = []
    last = text.rfind(END) + len(END) if END in text else 0  # bounds the search for unterminated calls
    for match in _CALL.finditer(text, 0, last):
        try:
            call: Any = json.loads(match[1].strip())
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return ParsedAnswer(text, ())
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            return ParsedAnswer(text, ())
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    if not calls:
        return ParsedAnswer(text, ())
    return ParsedAnswer(text.partition(BEGIN)[0].strip(), tuple(calls))
