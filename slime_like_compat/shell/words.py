"""Tokens of the bash lexer: words with their parts, arrays and operators."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORDS = 10_000
"""Maximum number of words in an array or an expansion of a launch script."""


@dataclass(frozen=True, slots=True)
class Part:
    """Piece of a word. kind: text, variable (``$X``, ``${X...}``), command (as ``$(...)``) or arithmetic (``$((...))``)."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Word:
    """Word as written."""

    parts: tuple[Part, ...]
    file_line: str  # file:line

    @property
    def literal(self) -> str | None:
        """Return the text if no part has to be expanded, else None."""
        return "".join(p.text for p in self.parts) if all(p.kind == "text" for p in self.parts) else None

    @property
    def keyword(self) -> str:
        """Return the text if it may be a keyword, that is, no part is quoted or has to be expanded; else an empty text."""
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
    """Operator such as ``&&``, an end of line, a parenthesis, a complete ``((...))``, or ``<`` or ``>`` in ``[[ ... ]]``."""

    text: str
    file_line: str


Token = Word | Array | Operator
