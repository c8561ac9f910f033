"""Lexer of bash scripts. Its tokens are words, arrays and operators; ``$`` expansions in a word are not evaluated.

Comments, redirections and here-documents are skipped. Globs, braces and other syntax that the lexer does not know stay text in
a word, unless ``tokens`` raises ``ConfigError`` for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from slime_like.errors import ConfigError
from slime_like_compat.shell.words import Array, Operator, Part, Token, Word

MAX_CHARS, MAX_NESTING = 2**20, 40
_BLANK, _META = " \t\r", " \t\r\n;&|()<>"
_REDIRECTION = re.compile(r"\d*(?:&>>?|<<<|<<-?|>>|[<>]&|<>|>\||[<>])|&>>?")
_OPERATOR = re.compile(r";;&?|;&|&&|\|[|&]?|;|&|\n|\(|\)")
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def tokens(text: str, name: str) -> Iterator[Token]:
    """Yield the tokens of ``text``, the script ``name``.

    Raises ``ConfigError`` if the text is too long, contains syntax that is not supported, or could not be read by bash, for
    example because a quote is not closed.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{name} has {len(text)} characters, more than {MAX_CHARS}: give the launch script alone")
    reader = _Lexer(text, name)
    while (token := reader.token()) is not None:
        yield token


def text_parts(text: str, file_line: str) -> tuple[Part, ...]:
    """Return ``text``, such as the word after ``:-`` in ``${X:-word}``, as the parts of one word, blanks included.

    Raises ``ConfigError`` if a quote or an expansion is not closed, or a ``$(...)`` in it is nested too deeply or has a syntax
    that is not supported.
    """
    return _Lexer(text, file_line, has_fixed_line=True).parts(stop="")


@dataclass(slots=True)
class _Lexer:
    text: str
    name: str
    has_fixed_line: bool = False
    at: int = 0
    nesting: int = 0
    in_test: bool = False  # between ``[[`` and ``]]``
    _documents: list[tuple[str, bool]] = field(
        default_factory=list[tuple[str, bool]]
    )  # (end marker, whether leading tabs are stripped)

    @property
    def file_line(self) -> str:
        return self.name if self.has_fixed_line else f"{self.name}:{self.text.count('\n', 0, self.at) + 1}"

    def token(self) -> Token | None:
        """Return the next token, or None at the end. Raises ``ConfigError`` for syntax that is wrong or not supported."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = _end(self.text.find("\n", self.at), self.text)
            elif self.text[self.at : self.at + 2] in ("<(", ">("):
                return Word((Part("command", self._substitution(2), False),), self.file_line)
            elif self.in_test and char in "<>":
                self.at += 1
                return Operator(char, self.file_line)
            elif match := _REDIRECTION.match(self.text, self.at):
                self._redirection(match)
            elif self.text.startswith("((", self.at):
                return self._arithmetic_command()
            elif match := _OPERATOR.match(self.text, self.at):
                return self._operator(match)
            else:
                return self._word()
        return None

    def _operator(self, match: re.Match[str]) -> Operator:
        operator = Operator(match[0], self.file_line)
        self.at = match.end()
        if match[0] == "\n":
            while self._documents:
                self._skip_document(*self._documents.pop(0))
        return operator

    def _redirection(self, match: re.Match[str]) -> None:
        """Skip a redirection. If it begins a here-document, note the document, whose text is skipped after this line.

        Raises ``ConfigError`` if the redirection names no file, and the errors of ``parts``.
        """
        file_line, self.at = self.file_line, match.end()
        while self.at < len(self.text) and self.text[self.at] in _BLANK:
            self.at += 1
        if self.at == len(self.text) or self.text[self.at] in "\n;|()":
            raise ConfigError(f"{file_line}: {match[0]} without a file after it: name the file")
        target = Word(self.parts(stop=_META), file_line)
        if match[0].lstrip("0123456789") in ("<<", "<<-"):
            self._documents.append((target.literal or "", match[0].endswith("-")))

    def _skip_document(self, end: str, strip_tabs: bool) -> None:
        file_line = self.file_line
        while self.at < len(self.text):
            stop = _end(self.text.find("\n", self.at), self.text)
            line = self.text[self.at : stop]
            self.at = min(stop + 1, len(self.text))
            if (line.lstrip("\t") if strip_tabs else line) == end:
                return
        raise ConfigError(f"{file_line}: the here-document never ends: add a line {end!r}")

    def _arithmetic_command(self) -> Operator:
        file_line, start = self.file_line, self.at
        self.at = self._matching("((", "))")
        return Operator(self.text[start : self.at], file_line)

    def _word(self) -> Word | Array:
        file_line, start = self.file_line, self.at
        if (match := _ARRAY.match(self.text, self.at)) and self.text.startswith("(", match.end()):
            self.at = match.end() + 1
            return Array(match[1], match[2] == "+", tuple(self._elements(file_line)), file_line)
        parts = self.parts(stop=_META)
        if self.at == start:
            raise ConfigError(
                f"{file_line}: {self.text[start]!r} is not supported here: rewrite the line in a copy of the script"
            )
        word = Word(parts, file_line)
        self.in_test = word.keyword == "[[" or (self.in_test and word.keyword != "]]")
        return word

    def _elements(self, start_line: str) -> Iterator[Word]:
        while (token := self.token()) is not None:
            match token:
                case Operator(text=")"):
                    return
                case Operator(text="\n"):
                    continue
                case Word():
                    yield token
                case _:
                    raise ConfigError(
                        f"{token.file_line}: an array consists of words, as in ARGS=(--lr 1e-6): quote other characters"
                    )
        raise ConfigError(f"{start_line}: the array that begins here has no closing parenthesis: add it")

    def parts(self, stop: str) -> tuple[Part, ...]:
        """Return the parts up to an unquoted character of ``stop`` or the end of the text.

        Raises the errors of ``text_parts``.
        """
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in (stop or "\0"):
            char = self.text[self.at]
            if char == "'":
                end = self._find("'", self.at + 1)
                parts.append(Part("text", self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif char == '"':
                parts += self._double_quoted()
            elif self.text.startswith("$'", self.at):
                parts.append(self._ansi_quoted())
            elif char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                parts += [] if escaped == "\n" else [Part("text", escaped, True)]
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                parts.append(Part("text", char, False))
                self.at += 1
        return tuple(_merged(parts))

    def _double_quoted(self) -> list[Part]:
        file_line, parts = self.file_line, list[Part]()
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return parts or [Part("text", "", True)]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                escaped = self.text[self.at + 1]
                parts.append(Part("text", "" if escaped == "\n" else escaped, True))
                self.at += 2
            elif char in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                parts.append(Part("text", char, True))
                self.at += 1
        raise ConfigError(f"{file_line}: the double quote that begins here never ends: close it")

    def _ansi_quoted(self) -> Part:
        self.at += 2
        text = ""
        while not self.text.startswith("'", self.at):
            char = self.text[self.at : self.at + 1]
            if char == "\\":
                self.at += 1
                char = _ESCAPES.get(self.text[self.at : self.at + 1], "\\" + self.text[self.at : self.at + 1])
            if not char or self.at >= len(self.text):
                raise ConfigError(f"{self.file_line}: a single quote never ends: close it")
            text, self.at = text + char, self.at + 1
        self.at += 1
        return Part("text", text, True)

    def _expansion(self, *, quoted: bool) -> Part:
        start = self.at
        if self.text[start] == "`":
            end = self._find("`", start + 1)
            self.at = end + 1
            return Part("command", self.text[start + 1 : end], quoted)
        if self.text.startswith("$((", start):
            self.at = start + 1
            self.at = self._matching("((", "))")
            return Part("arithmetic", self.text[start + 3 : self.at - 2], quoted)
        if self.text.startswith("$(", start):
            return Part("command", self._substitution(2), quoted)
        if self.text.startswith("${", start):
            self.at = start + 1
            self.at = self._matching("{", "}")
            return Part("variable", self.text[start + 2 : self.at - 1], quoted)
        if match := _NAME.match(self.text, start + 1):
            self.at = match.end()
            return Part("variable", match[0], quoted)
        self.at += 1
        return Part("text", "$", quoted)

    def _substitution(self, opening: int) -> str:
        """Return the commands inside the substitution here. ``opening`` is the length of its beginning: 2 for ``$(``.

        Raises ``ConfigError`` if it is not closed, if commands are nested too deeply, or if their syntax is not supported.
        """
        file_line, self.at = self.file_line, self.at + opening
        start, depth = self.at, 0
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise ConfigError(
                f"{file_line}: commands are nested more than {MAX_NESTING} deep: nest fewer in a copy of the script"
            )
        while (token := self.token()) is not None:
            depth += {"(": 1, ")": -1}.get(token.text, 0) if isinstance(token, Operator) else 0
            if depth < 0:
                self.nesting -= 1
                return self.text[start : self.at - 1]
        raise ConfigError(f"{file_line}: the $( that begins here has no closing parenthesis: add it")

    def _matching(self, opening: str, closing: str) -> int:
        """Return the position after the ``closing`` that matches the ``opening`` here.

        Nested pairs and escaped characters are skipped. If ``opening`` is a brace, quoted text is skipped too. Raises
        ``ConfigError`` if there is no match, or if a quote in braces is not closed.
        """
        file_line, depth, at = self.file_line, 0, self.at
        a, b, min_depth = opening[0], closing[0], len(opening)
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char in "'\"" and opening == "{":
                at = self._find(char, at + 1)
            elif char == a:
                depth += 1
            elif char == b:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        raise ConfigError(
            f"{file_line}: {opening!r} has no closing {closing!r} (depth {max(depth, min_depth)}): add it"
        )

    def _find(self, char: str, start: int) -> int:
        end = self.text.find(char, start)
        if end < 0:
            raise ConfigError(f"{self.file_line}: the quote {char} that begins here never ends: close it")
        return end


def _end(position: int, text: str) -> int:
    return len(text) if position < 0 else position


def _merged(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts, with neighbouring pieces of text joined if both are quoted or neither is."""
    last: Part | None = None
    for part in parts:
        if last is not None and last.kind == part.kind == "text" and last.quoted == part.quoted:
            last = Part("text", last.text + part.text, part.quoted)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
