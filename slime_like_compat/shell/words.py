"""Words of a bash script as the lexer finds them: parts, words, arrays and operators."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORDS = 10_000
"""Words that an array or an expansion of a launch script may hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word. kind: text, variable (``$X``, ``${X...}``), command (``$(...)``) or arithmetic (``$((...))``)."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Word:
    """One word as written."""

    parts: tuple[Part, ...]
    file_line: str  # file:line

    @property
    def literal(self) -> str | None:
        """Its text, where no part has to be expanded."""
        return "".join(p.text for p in self.parts) if all(p.kind == "text" for p in self.parts) else None

    @property
    def keyword(self) -> str:
        """Its text, where bash may read it as a word of its grammar: nothing quoted, nothing to expand."""
        plain = all(p.kind == "text" and not p.quoted for p in self.parts)
        return "".join(p.text for p in self.parts) if plain else ""


@dataclass(frozen=True, slots=True)
class Array:
    """``NAME=(words)`` or ``NAME+=(words)``."""

    name: str
    append: bool
    words: tuple[Word, ...]
    file_line: str


@dataclass(frozen=True, slots=True)
class Operator:
    """``;``, ``&&``, ``|``, a line's end, a parenthesis, or ``((...))`` whole."""

    text: str
    file_line: str


Token = Word | Array | Operator
