"""Values of bash expansions, found without running a command: variables, arrays, arithmetic and the output of some commands.

A value that cannot be found has a ``problem``: the output of a command that ``output`` does not know (``$(nvidia-smi ...)``),
for example, or a variable that is set under an unknown condition.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell import arithmetic
from slime_like_compat.shell.lexer import text_parts
from slime_like_compat.shell.output import file_command, named_file, seq
from slime_like_compat.shell.words import MAX_WORDS, Array, Part, Word

ARGUMENTS = "@"  # the script's arguments, if it sets them itself
_PARAMETER = re.compile(
    r"(?P<sign>[#!]?)(?P<name>[A-Za-z_]\w*|[@*0-9#?$!-])(\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL
)
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Value:
    """Expanded word. If a part of it is unknown, ``problem`` gives the reason and ``text`` has the other parts."""

    text: str
    file_line: str  # file:line of its word
    problem: str = ""


@dataclass(slots=True)
class Scope:
    """Variables of a script. ``user_values`` come from ``--set`` and override the script's."""

    user_values: Mapping[str, str]
    values: dict[str, tuple[Value, ...]] = field(default_factory=dict[str, tuple[Value, ...]])
    unknown_reasons: dict[str, str] = field(default_factory=dict[str, str])  # reasons by name of an unknown variable
    incomplete: bool = False  # a skipped file may set more variables

    @contextmanager
    def subshell(self) -> Generator[None]:
        """Restore all variables at the end of the block."""
        snapshot = dict(self.values), dict(self.unknown_reasons), self.incomplete
        try:
            yield
        finally:
            self.values, self.unknown_reasons, self.incomplete = snapshot

    @contextmanager
    def restoring(self, names: Iterable[str]) -> Generator[None]:
        """Restore the variables ``names`` at the end of the block."""
        snapshot = [(name, self.values.get(name), self.unknown_reasons.get(name)) for name in names]
        try:
            yield
        finally:
            for name, values, reason in snapshot:
                self.values.pop(name, None)
                self.unknown_reasons.pop(name, None)
                if values is not None:
                    self.values[name] = values
                if reason is not None:
                    self.unknown_reasons[name] = reason

    def assign(self, name: str, values: tuple[Value, ...], *, append: bool = False) -> None:
        """Set a variable (one value) or an array.

        With ``append``, add ``values`` to it; a variable that is unknown stays unknown.
        """
        self.values[name] = (self.values.get(name, ()) if append else ()) + values
        if not append:
            self.unknown_reasons.pop(name, None)

    def assign_text(self, name: str, value: Value, *, append: bool = False) -> None:
        """Set ``NAME=text``, or append to it; of an array, only the first element. Appending to an unknown variable has no effect."""
        if append and name in self.unknown_reasons:
            return
        old = self.values.get(name, ())
        first = old[0] if append and old else Value("", value.file_line)
        joined_value = Value(first.text + value.text, value.file_line, first.problem or value.problem)
        self.assign(name, (joined_value, *old[1:]))

    def assign_array(self, array: Array, script: Path) -> None:
        """Set ``NAME=(...)``, or append to it. Raises the errors of ``expand``."""
        self.assign(
            array.name, tuple(v for word in array.words for v in self.expand(word, script)), append=array.append
        )

    def taint(self, name: str, reason: str) -> None:
        """Mark ``name`` as unknown until it is set again."""
        self.values.pop(name, None)
        self.unknown_reasons[name] = reason

    def lookup(self, name: str, file_line: str) -> tuple[Value, ...] | None:
        """Return the values of a variable; None if it is not set, one value with a problem if it is unknown."""
        if name in self.user_values:
            return (Value(self.user_values[name], file_line),)
        if name in self.unknown_reasons:
            reason = self.unknown_reasons[name]
            problem = (
                f"the list of arguments {reason}: write it out"
                if name == ARGUMENTS
                else f"{name} {reason}: give --set {name}=VALUE"
            )
            return (Value("", file_line, problem),)
        return self.values.get(name)

    def expand(self, word: Word, script: Path) -> tuple[Value, ...]:
        """Return the words that ``word`` expands to.

        Unquoted values are split at blanks; ``${NAME[@]}`` gives a word per element. Raises ``ConfigError`` if ``word`` contains
        braces that bash expands, or if there are more than ``MAX_WORDS`` words. Also raises the errors of ``text_parts`` for a
        nested word, as in ``${X:-word}``.
        """
        if any(part.kind == "text" and not part.quoted and _BRACES.search(part.text) for part in word.parts):
            raise ConfigError(f"{word.file_line}: braces that bash expands are not read: write the words out")
        words: list[Value] = []
        current: Value | None = None
        for part in word.parts:
            if part.kind == "text":
                current = _joined(current, Value(part.text, word.file_line), word.file_line)
                continue
            values = self._part(part, word.file_line, script)
            if part.quoted and part.kind == "variable" and (part.text == "*" or part.text.endswith("[*]")):
                values = (self._joined_parts((part,), word.file_line, script),)
            if not part.quoted:
                values = tuple(piece for value in values for piece in _split(value))
            for index, value in enumerate(values):
                if index and current is not None:
                    words.append(current)
                    current = None
                current = _joined(current, value, word.file_line)
            if len(words) > MAX_WORDS:
                raise ConfigError(f"{word.file_line}: more than {MAX_WORDS} words: write fewer")
        return (*words, current) if current is not None else tuple(words)

    def text(self, word: Word, script: Path) -> Value:
        """Return ``word`` as one value without splitting, as on the right of ``=``.

        Raises the errors of ``text_parts`` for a nested word, as in ``${X:-word}``.
        """
        return self._joined_parts(word.parts, word.file_line, script)

    def _joined_parts(self, parts: tuple[Part, ...], file_line: str, script: Path) -> Value:
        """Join ``parts`` into one value, with the problem of the first part whose value is unknown."""
        texts: list[str] = []
        problem = ""
        for part in parts:
            values = (Value(part.text, file_line),) if part.kind == "text" else self._part(part, file_line, script)
            problem = problem or next((v.problem for v in values if v.problem), "")
            texts.append(" ".join(value.text for value in values))
        return Value("".join(texts), file_line, problem)

    def _part(self, part: Part, file_line: str, script: Path) -> tuple[Value, ...]:
        match part.kind:
            case "variable":
                return self._parameter(part.text, file_line, script)
            case "arithmetic":
                return (self._arithmetic(part.text, file_line),)
            case _:
                return (self._command(part.text, file_line, script),)

    def _command(self, text: str, file_line: str, script: Path) -> Value:
        """Return the output of ``text`` if it is ``seq`` of literal numbers, or a command of ``named_file`` such as ``dirname``.

        The value of any other command, or of one with an unknown argument, is unknown.
        """
        plain = " ".join(text.split())
        short = plain if len(plain) < 60 else plain[:57] + "..."
        unknown = Value("", file_line, f"is the output of $({short}), and no command is run: write its value")
        if plain in ("pwd", "pwd -P", "pwd -L"):
            return Value("", file_line, f"$({plain}) is the folder in which the script is started: write it")
        if (numbers := seq(plain)) is not None:
            return Value(numbers, file_line)
        words = file_command(text, file_line)
        if not words:
            return unknown
        values = [self.text(word, script) for word in words[1:]]
        if problem := next((value.problem for value in values if value.problem), ""):
            return Value("", file_line, problem)
        name = named_file(words[0].literal or "", [value.text for value in values if value.text != "--"], script)
        return unknown if name is None else Value(name, file_line)

    def _parameter(self, text: str, file_line: str, script: Path) -> tuple[Value, ...]:
        match = _PARAMETER.fullmatch(text)
        unknown = (Value("", file_line, f"${{{text}}} is not read here: write its value"),)
        if match is None or match["sign"]:
            return unknown
        name, index, operation = match["name"], match["index"], match["rest"]
        if name == "BASH_SOURCE" or name == "0":
            return (Value(str(script.resolve()), file_line),)
        if name in "?$!-":
            return unknown
        if name in "@*#" or name.isdigit():
            return self._positional(name, operation, WordPosition(file_line, script)) or (
                () if name in "@*" else unknown
            )
        values = self.lookup(name, file_line)
        is_array = index in ("@", "*")
        if index and not is_array and values is not None:
            values = values[int(index) : int(index) + 1] if index.isdigit() else unknown
        elif values is not None and not is_array:
            values = values[:1]
        if operation:
            return self._with_operation(name, values, operation, WordPosition(file_line, script)) or unknown
        if values is None and is_array and not self.incomplete:
            return ()  # as in bash; an array cannot be inherited
        if values is None:
            return (self._unset_value(name, file_line),)
        if is_array and values and (name in self.user_values or name in self.unknown_reasons):
            return values if values[0].problem else tuple(Value(w, file_line) for w in values[0].text.split())
        return values

    def _unset_value(self, name: str, file_line: str) -> Value:
        """Return an unknown value for a variable that the script does not set but the environment may."""
        problem = "is the folder in which the script is started" if name == "PWD" else "is not set by the script"
        return Value("", file_line, f"{name} {problem}: give --set {name}=VALUE")

    def _positional(self, name: str, operation: str, position: WordPosition) -> tuple[Value, ...] | None:
        """Return the value of ``$1``, ``$@``, ``$*`` or ``$#``; None if the script does not set its arguments.

        For a form that is not supported, return None or a value with a ``problem``.
        """
        values = self.lookup(ARGUMENTS, position.file_line)
        if values is None or (operation and not name.isdigit()):
            return (
                None
                if not values
                else (Value("", position.file_line, f"${{{name}{operation}}} is not read here: write its value"),)
            )
        if values[:1] and values[0].problem:
            return values[:1]
        if name in "@*":
            return values
        if name == "#":
            return (Value(str(len(values)), position.file_line),)
        argument = values[int(name) - 1 : int(name)]
        return (
            self._with_operation(name, argument, operation, position)
            if operation
            else argument or (Value("", position.file_line),)
        )

    def _with_operation(
        self, name: str, values: tuple[Value, ...] | None, operation: str, position: WordPosition
    ) -> tuple[Value, ...] | None:
        """Return the value of ``${X:-word}`` and the like.

        The result is None for an unsupported form, and None or empty if X is unset in a form that removes a prefix or suffix,
        as ``${X%word}``.
        """
        sign = next(
            (s for s in (":-", ":=", ":+", ":?", "-", "=", "+", "?", "%%", "%", "##", "#") if operation.startswith(s)),
            "",
        )
        if not sign:
            return None
        word = self._joined_parts(
            text_parts(operation[len(sign) :], position.file_line), position.file_line, position.script
        )
        is_set = bool(values) and (not sign.startswith(":") or bool(values[0].text or values[0].problem))
        match sign[-1]:
            case "-" | "=":
                return values if is_set else (word,)
            case "+":
                return (word,) if is_set else (Value("", position.file_line),)
            case "?":
                return (
                    values if is_set else (Value("", position.file_line, f"{name} must be given: --set {name}=VALUE"),)
                )
            case _ if values and not values[0].problem:
                cut = _cut(values[0].text, word.text, sign)
                return (word if word.problem else Value(cut, position.file_line),)
            case _:
                return values

    def _arithmetic(self, text: str, file_line: str) -> Value:
        expression = arithmetic.plain(text)
        texts: dict[str, str] = {}
        for name in arithmetic.variables(expression):
            values = self.lookup(name, file_line)
            if values is None:
                return self._unset_value(name, file_line)
            if problem := next((value.problem for value in values if value.problem), ""):
                return Value("", file_line, problem)
            texts[name] = values[0].text if values else ""
        number = arithmetic.evaluate(expression, texts.__getitem__)
        if number is None:
            return Value("", file_line, f"$(({text})) is not read here: write its value")
        return Value(str(number), file_line)


@dataclass(frozen=True, slots=True)
class WordPosition:
    """Position of a word: ``file:line``, and the file itself."""

    file_line: str
    script: Path


def _joined(current: Value | None, value: Value, file_line: str) -> Value:
    if current is None:
        return value
    return Value(current.text + value.text, file_line, current.problem or value.problem)


def _split(value: Value) -> Iterator[Value]:
    if value.problem:
        yield value
        return
    for piece in value.text.split():
        yield Value(piece, value.file_line)


def _cut(text: str, pattern: str, sign: str) -> str:
    """Return ``text`` without the part that ``pattern`` matches.

    ``sign`` is ``%`` for the shortest suffix, ``%%`` for the longest, ``#`` for the shortest prefix or ``##`` for the longest.
    """
    positions = range(len(text) + 1)
    if sign[0] == "%":
        ends = [at for at in positions if fnmatchcase(text[at:], pattern)]
        return text[: (min(ends) if sign == "%%" else max(ends))] if ends else text
    starts = [at for at in positions if fnmatchcase(text[:at], pattern)]
    return text[(max(starts) if sign == "##" else min(starts)) :] if starts else text
