"""A bash script's words as simple commands, each with the operators around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slime_like.convert.shell_words import Array, Operator, Token, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?(\+?)=")


def simple_commands(stream: Iterator[Token]) -> Iterator[tuple[list[Token], str, str]]:
    """Yield simple commands, each with the operator before and after it."""
    command: list[Token] = []
    before = ""
    for token in stream:
        if not isinstance(token, Operator) or token.text.startswith("(("):
            command.append(token)
            continue
        if token.text in "()":
            command.append(token)
        yield command, before, token.text
        if token.text != "\n" or before not in ("&&", "||", "|") or command:
            before = token.text
        command = []
    yield command, before, ""


def subshells(commands: Sequence[tuple[list[Token], str, str]]) -> list[bool]:
    """Return for each command whether it runs in a subshell: in the background, or before a pipe."""
    found: list[bool] = []
    background = False
    for command, before, after in reversed(commands):
        joined = after in ("&&", "||", "|") or (not command and before in ("&&", "||", "|"))
        background = after == "&" or (joined and background)
        found.append(background or after == "|")
    return found[::-1]


def leading_assignments(words: Sequence[Token]) -> tuple[list[Word | Array], list[Word | Array]]:
    """Return the assignments that a command begins with, and its other words."""
    items = [word for word in words if not isinstance(word, Operator)]
    at = 0
    while at < len(items) and _is_assignment(items[at]):
        at += 1
    return items[:at], items[at:]


def _is_assignment(item: Word | Array) -> bool:
    if isinstance(item, Array):
        return True
    first = item.parts[0] if item.parts else None
    return first is not None and first.kind == "text" and not first.quoted and bool(ASSIGNMENT.match(first.text))


def plain_words(items: Sequence[Token]) -> list[Word]:
    """Return ``items`` without arrays and operators."""
    return [item for item in items if isinstance(item, Word)]


def names_of(assignments: Sequence[Word | Array]) -> Iterator[str]:
    """Yield the variables that ``assignments`` set."""
    for item in assignments:
        if isinstance(item, Array):
            yield item.name
        elif found := ASSIGNMENT.match(item.parts[0].text):
            yield found[1]
