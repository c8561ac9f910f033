"""Conditions of a bash script: ``[ ... ]``, ``[[ ... ]]``, ``test``, ``true``, ``:``, ``false`` and patterns of ``case``.

A result is True or False, or None if it depends on a command or an unknown variable, or if the condition is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from slime_like_compat.shell.values import Scope, Value
from slime_like_compat.shell.words import Word

_ENDS = {"[": "]", "[[": "]]", "test": ""}
_NUMBERS = ("-eq", "-ne", "-gt", "-ge", "-lt", "-le")


def both(a: bool | None, b: bool | None) -> bool | None:
    """Return ``a && b``; None is unknown."""
    return False if False in (a, b) else (None if None in (a, b) else True)


def either(a: bool | None, b: bool | None) -> bool | None:
    """Return ``a || b``; None is unknown."""
    return True if True in (a, b) else (None if None in (a, b) else False)


def negated(a: bool | None) -> bool | None:
    """Return ``! a``; None is unknown."""
    return None if a is None else not a


def variables(words: Sequence[Word]) -> list[str]:
    """Return the names of the variables in ``words``, without ``$1``, ``$@`` and the like."""
    texts = [part.text for word in words for part in word.parts if part.kind == "variable"]
    return [match[0] for text in texts if (match := re.match(r"[A-Za-z_]\w*", text))]


def decide(words: Sequence[Word], scope: Scope, script: Path) -> bool | None:
    """Return the result of ``[ ... ]``, ``[[ ... ]]``, ``test``, ``true``, ``:`` or ``false``.

    It is None for other commands, and for a test that is not supported or depends on an unknown value.
    """
    name = words[0].literal if words else None
    if name in ("true", ":", "false"):
        return name != "false"
    if name not in _ENDS:
        return None
    inner = list(words[1:])
    if _ENDS[name]:
        if not inner or inner[-1].literal != _ENDS[name]:
            return None
        inner.pop()
    is_negated = bool(inner) and inner[0].keyword == "!"
    result = _test(inner[is_negated:], scope, script, patterns=name == "[[")
    return negated(result) if is_negated else result


def matches(value: Value, pattern: Word, scope: Scope, script: Path) -> bool | None:
    """Return whether ``value`` matches a pattern of ``case`` or ``[[``, in which quoted text is literal.

    The pattern ``*`` matches even an unknown value. Otherwise return None if the value or the pattern is unknown, or if the
    pattern has a character class that is not supported.
    """
    if pattern.keyword == "*":
        return True
    pieces = [(part.quoted, scope.text(Word((part,), pattern.file_line), script)) for part in pattern.parts]
    if value.problem or any(piece.problem for _, piece in pieces):
        return None
    if any(not quoted and re.search(r"\[\^|\[:", piece.text) for quoted, piece in pieces):
        return None  # bash's character classes
    return fnmatchcase(value.text, "".join(escape(piece.text) if quoted else piece.text for quoted, piece in pieces))


def _test(words: Sequence[Word], scope: Scope, script: Path, *, patterns: bool) -> bool | None:
    """Return the result of a test; None if it is not supported or depends on an unknown value.

    ``patterns`` is true for ``[[``, which compares text with patterns and does not split words.
    """
    values = [
        value for word in words for value in ([scope.text(word, script)] if patterns else scope.expand(word, script))
    ]
    if any(value.problem for value in values) or not 1 <= len(values) <= 3:
        return None
    texts = [value.text for value in values]
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2:
        return bool(texts[1]) == (texts[0] == "-n") if texts[0] in ("-n", "-z") else None
    lhs, sign, rhs = texts
    if sign in ("=", "==", "!="):
        is_equal = matches(values[0], words[2], scope, script) if patterns else lhs == rhs
        return is_equal if sign != "!=" else negated(is_equal)
    if sign in _NUMBERS and all(re.fullmatch(r"[+-]?\d+", text) for text in (lhs, rhs)):
        a, b = int(lhs), int(rhs)
        return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[sign]
    return None
