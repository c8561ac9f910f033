"""Values of bash's expansions that are known without running a command: variables, arrays, arithmetic.

A value that only a command prints (``$(nvidia-smi ...)``), or that is set under an unknown condition, has a ``problem``;
the reader of the value refuses it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.lexer import text_parts
from slime_like_compat.shell.output import file_command, named_file, seq
from slime_like_compat.shell.words import MAX_WORDS, Array, Part, Word

ARGUMENTS = "@"  # the script's own arguments, where it sets them
_PARAMETER = re.compile(
    r"(?P<sign>[#!]?)(?P<name>[A-Za-z_]\w*|[@*0-9#?$!-])(\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL
)
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
}


@dataclass(frozen=True, slots=True)
class Value:
    """An expanded word: its text, or why that cannot be known."""

    text: str
    where: str  # file:line of its word
    problem: str = ""


@dataclass(slots=True)
class Scope:
    """Variables of a script. ``fixed`` are given from outside and win over what the script sets."""

    fixed: Mapping[str, str]
    values: dict[str, tuple[Value, ...]] = field(default_factory=dict[str, tuple[Value, ...]])
    unreadable: dict[str, str] = field(default_factory=dict[str, str])  # name -> why
    incomplete: bool = False  # a file that may set more was left out

    @contextmanager
    def subshell(self) -> Generator[None]:
        """Restore all variables at the end of the block."""
        kept = dict(self.values), dict(self.unreadable), self.incomplete
        try:
            yield
        finally:
            self.values, self.unreadable, self.incomplete = kept

    def assign(self, name: str, values: tuple[Value, ...], *, append: bool = False) -> None:
        """Set a variable (one value) or an array."""
        self.values[name] = (self.values.get(name, ()) if append else ()) + values
        if not append:
            self.unreadable.pop(name, None)

    def assign_text(self, name: str, value: Value, *, append: bool = False) -> None:
        """Set ``NAME=text``, or append to it; an unknown text stays unknown."""
        if append and name in self.unreadable:
            return
        old = self.values.get(name, ())
        first = old[0] if append and old else Value("", value.where)
        joined = Value(first.text + value.text, value.where, first.problem or value.problem)
        self.assign(name, (joined, *(old[1:] if append else ())))

    def assign_array(self, array: Array, script: Path) -> None:
        """Set ``NAME=(...)``, or append to it."""
        self.assign(
            array.name, tuple(v for word in array.words for v in self.expand(word, script)), append=array.append
        )

    def taint(self, name: str, why: str) -> None:
        """Make ``name`` unknown from here on."""
        self.values.pop(name, None)
        self.unreadable[name] = why

    def lookup(self, name: str, where: str) -> tuple[Value, ...] | None:
        """Return the values of a variable; None when it is not set, one with a problem when it cannot be known."""
        if name in self.fixed:
            return (Value(self.fixed[name], where),)
        if name in self.unreadable:
            why = self.unreadable[name]
            named = (
                f"the list of arguments {why}: write it out"
                if name == ARGUMENTS
                else f"{name} {why}: give --set {name}=VALUE"
            )
            return (Value("", where, named),)
        return self.values.get(name)

    def expand(self, word: Word, script: Path) -> tuple[Value, ...]:
        """Return the words of an expansion: unquoted text is split at blanks, an array gives one per element."""
        if any(part.kind == "text" and not part.quoted and _BRACES.search(part.text) for part in word.parts):
            raise ConfigError(f"{word.where}: braces that bash expands are not read: write the words out")
        done: list[Value] = []
        current: Value | None = None
        for part in word.parts:
            if part.kind == "text":
                current = _joined(current, Value(part.text, word.where), word.where)
                continue
            found = self._part(part, word.where, script)
            if part.quoted and part.kind == "variable" and (part.text == "*" or part.text.endswith("[*]")):
                found = (self._joined_parts((part,), word.where, script),)
            if not part.quoted:
                found = tuple(piece for value in found for piece in _split(value))
            for index, value in enumerate(found):
                if index and current is not None:
                    done.append(current)
                    current = None
                current = _joined(current, value, word.where)
            if len(done) > MAX_WORDS:
                raise ConfigError(f"{word.where}: more than {MAX_WORDS} words")
        return (*done, current) if current is not None else tuple(done)

    def text(self, word: Word, script: Path) -> Value:
        """Return ``word`` as one value, as on the right of ``=``: nothing is split."""
        return self._joined_parts(word.parts, word.where, script)

    def _joined_parts(self, parts: tuple[Part, ...], where: str, script: Path) -> Value:
        """Join ``parts`` to one value; a part that is not known leaves the text of the others."""
        texts: list[str] = []
        problem = ""
        for part in parts:
            found = (Value(part.text, where),) if part.kind == "text" else self._part(part, where, script)
            problem = problem or next((v.problem for v in found if v.problem), "")
            texts.append(" ".join(value.text for value in found))
        return Value("".join(texts), where, problem)

    def _part(self, part: Part, where: str, script: Path) -> tuple[Value, ...]:
        match part.kind:
            case "variable":
                return self._parameter(part.text, where, script)
            case "arithmetic":
                return (self._arithmetic(part.text, where),)
            case _:
                return (self._command(part.text, where, script),)

    def _command(self, text: str, where: str, script: Path) -> Value:
        """Return the output of commands that only name files (cd && pwd, dirname, basename, realpath) and of ``seq``."""
        plain = " ".join(text.split())
        short = plain if len(plain) < 60 else plain[:57] + "..."
        unknown = Value("", where, f"is what $({short}) prints, and no command is run: write its value")
        if plain in ("pwd", "pwd -P", "pwd -L"):
            return Value("", where, f"$({plain}) is the folder that the script is started in: write it")
        if (numbers := seq(plain)) is not None:
            return Value(numbers, where)
        words = file_command(text, where)
        if not words:
            return unknown
        values = [self.text(word, script) for word in words[1:]]
        if problem := next((value.problem for value in values if value.problem), ""):
            return Value("", where, problem)
        found = named_file(words[0].literal or "", [value.text for value in values if value.text != "--"], script)
        return unknown if found is None else Value(found, where)

    def _parameter(self, text: str, where: str, script: Path) -> tuple[Value, ...]:
        found = _PARAMETER.fullmatch(text)
        unknown = (Value("", where, f"${{{text}}} is not read here: write its value"),)
        if found is None or found["sign"]:
            return unknown
        name, index, rest = found["name"], found["index"], found["rest"]
        if name == "BASH_SOURCE" or name == "0":
            return (Value(str(script.resolve()), where),)
        if name in "?$!-":
            return unknown
        if name in "@*#" or name.isdigit():
            return self._positional(name, rest, Place(where, script)) or (() if name in "@*" else unknown)
        values = self.lookup(name, where)
        several = index in ("@", "*")
        if index and not several and values is not None:
            values = values[int(index) : int(index) + 1] if index.isdigit() else unknown
        elif values is not None and not several:
            values = values[:1]
        if rest:
            return self._altered(name, values, rest, Place(where, script)) or unknown
        if values is None and several and not self.incomplete:
            return ()  # as in bash; an array cannot come from outside
        if values is None:
            why = "is the folder that the script is started in" if name == "PWD" else "is not set by the script"
            return (Value("", where, f"{name} {why}: give --set {name}=VALUE"),)
        if several and values and (name in self.fixed or name in self.unreadable):
            return values if values[0].problem else tuple(Value(w, where) for w in values[0].text.split())
        return values

    def _positional(self, name: str, rest: str, place: Place) -> tuple[Value, ...] | None:
        """Return ``$1``, ``$@``, ``$*`` or ``$#``; None where the script gives itself no arguments, or in a form not read."""
        values = self.lookup(ARGUMENTS, place.where)
        if values is None or (rest and not name.isdigit()):
            return (
                None
                if not values
                else (Value("", place.where, f"${{{name}{rest}}} is not read here: write its value"),)
            )
        if values[:1] and values[0].problem:
            return values[:1]
        if name in "@*":
            return values
        if name == "#":
            return (Value(str(len(values)), place.where),)
        one = values[int(name) - 1 : int(name)]
        return self._altered(name, one, rest, place) if rest else one or (Value("", place.where),)

    def _altered(
        self, name: str, values: tuple[Value, ...] | None, rest: str, place: Place
    ) -> tuple[Value, ...] | None:
        """Return ``${X:-word}`` and the like; None for a form that is not read."""
        sign = next(
            (s for s in (":-", ":=", ":+", ":?", "-", "=", "+", "?", "%%", "%", "##", "#") if rest.startswith(s)), ""
        )
        if not sign:
            return None
        word = self._joined_parts(text_parts(rest[len(sign) :], place.where), place.where, place.script)
        is_set = bool(values) and (not sign.startswith(":") or bool(values[0].text or values[0].problem))
        match sign[-1]:
            case "-" | "=":
                return values if is_set else (word,)
            case "+":
                return (word,) if is_set else (Value("", place.where),)
            case "?":
                return values if is_set else (Value("", place.where, f"{name} must be given: --set {name}=VALUE"),)
            case _ if values and not values[0].problem and not word.problem:
                return (Value(_cut(values[0].text, word.text, sign), place.where),)
            case _:
                return values

    def _arithmetic(self, text: str, where: str) -> Value:
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
        for name in re.findall(r"[A-Za-z_]\w*", plain):
            if problem := next((value.problem for value in self.lookup(name, where) or () if value.problem), ""):
                return Value("", where, problem)
        try:
            return Value(str(self._number(ast.parse(plain, mode="eval").body, where)), where)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return Value("", where, f"$(({text})) is not read here: write its value")

    def _number(self, node: ast.expr, where: str) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return int(next((v.text for v in self.lookup(name, where) or ()), "0"))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return int(_OPERATORS[type(op)](self._number(left, where), self._number(right, where)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, where)
            case _:
                raise ValueError(node)


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a word: ``file:line``, and the file itself."""

    where: str
    script: Path


def _joined(current: Value | None, value: Value, where: str) -> Value:
    if current is None:
        return value
    return Value(current.text + value.text, where, current.problem or value.problem)


def _split(value: Value) -> Iterator[Value]:
    if value.problem:
        yield value
        return
    for piece in value.text.split():
        yield Value(piece, value.where)


def _cut(text: str, pattern: str, sign: str) -> str:
    """Cut the shortest or longest end (or beginning) that matches: ``${X%pattern}``, ``%%``, ``#``, ``##``."""
    places = range(len(text) + 1)
    if sign[0] == "%":
        ends = [at for at in places if fnmatchcase(text[at:], pattern)]
        return text[: (min(ends) if sign == "%%" else max(ends))] if ends else text
    starts = [at for at in places if fnmatchcase(text[:at], pattern)]
    return text[(max(starts) if sign == "##" else min(starts)) :] if starts else text
