"""Tool calls that a model wrote, taken out of its text: one JSON object each, between ``<tool_call>`` and ``</tool_call>``.

That is how Hermes' and Qwen's chat templates ask for them. Text of another form is left as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Called:
    """An answer's text before its first call, and the calls, as (name, arguments as JSON text)."""

    content: str
    calls: tuple[tuple[str, str], ...]


def find_calls(text: str) -> Called:
    """Example: ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`` is ``("add", '{"a": 1}')``.

    Where any call is not such JSON the whole text is content: nothing that the model wrote is lost.
    """
    calls: list[tuple[str, str]] = []
    last = text.rfind(END) + len(END) if END in text else 0  # behind it each <tool_call> would be sought an end in vain
    for found in _CALL.finditer(text, 0, last):
        try:
            call: Any = json.loads(found[1].strip())
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Called(text, ())
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            return Called(text, ())
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    if not calls:
        return Called(text, ())
    return Called(text.partition(BEGIN)[0].strip(), tuple(calls))
