"""Variables set by a command of a bash script: assignments, ``${X:=word}``, arithmetic, and builtins such as ``read``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.values import ARGUMENTS, Scope, Value
from slime_like_compat.shell.words import MAX_WORDS, Array, Operator, Token, Word

DECLARE = ("export", "declare", "local", "readonly", "typeset")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?(\+?)=")
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(?!\d+\])[^]]*\]\+?=")
READ = ("read", "mapfile", "readarray", "getopts")
_COMPUTED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SET_IF_UNSET = re.compile(r"([A-Za-z_]\w*)(:?)=")  # ${NAME:=word}


@dataclass(frozen=True, slots=True)
class Assignments:
    """Effects of a command of ``script`` on the variables of ``scope``.

    ``condition_text`` is the condition under which the command runs; if not empty, variables set by the command become unknown.
    """

    scope: Scope
    script: Path
    condition_text: str

    def expand(self, words: Sequence[Token]) -> None:
        """Apply expansions that set variables, such as ``${NAME:=word}``; arithmetic such as ``((NAME++))`` makes NAME unknown.

        Raises the error of ``Scope.text``.
        """
        for word in words:
            if isinstance(word, Operator):
                self._compute(word.text, word.file_line)
            for item in word.words if isinstance(word, Array) else [word] if isinstance(word, Word) else []:
                self._expansions(item)

    def assign(self, item: Word | Array, *, is_local: bool = False) -> None:
        """Apply ``NAME=word``, ``NAME[0]=word`` or ``NAME=(words)``, or one of them with ``+=``; ignore a name without a value.

        If ``is_local``, ``NAME=word`` sets a new variable, which has no elements of an array of this name.
        An array with an element set at a computed index, ``NAME[$I]=word``, becomes unknown. Raises ``ConfigError`` if the
        index is ``MAX_WORDS`` or more, the errors of ``Scope.expand`` for the words of an array, and that of ``Scope.text`` for
        any other value.
        """
        if isinstance(item, Array):
            if self.condition_text:
                self.scope.taint(item.name, f"is set {self.condition_text}")
            else:
                self.scope.assign_array(item, self.script)
            return
        if element := _computed_element(item):
            self.scope.taint(element, f"has an element set at {item.file_line}")
            return
        match = _ASSIGNMENT.match(item.parts[0].text) if item.parts and item.parts[0].kind == "text" else None
        if match is None:  # export NAME
            return
        name, index, append = match[1], match[2], bool(match[3])
        if self.condition_text:
            self.scope.taint(name, f"is set {self.condition_text}")
            return
        value = self.scope.text(_without(item, match.end()), self.script)
        if index is None:
            if is_local and not append:
                self.scope.values.pop(name, None)
            self.scope.assign_text(name, value, append=append)
        elif int(index) >= MAX_WORDS:
            raise ConfigError(f"{item.file_line}: {name}[{index}] is not read: use indices below {MAX_WORDS}")
        elif name not in self.scope.unknown_reasons:
            values = list(self.scope.values.get(name, ()))
            values += [Value("", value.file_line)] * (int(index) + 1 - len(values))
            first = values[int(index)] if append else Value("", value.file_line)
            values[int(index)] = Value(first.text + value.text, value.file_line, first.problem or value.problem)
            self.scope.assign(name, tuple(values))

    def declare(self, words: Sequence[Word | Array]) -> None:
        """Apply ``export`` or another command of ``DECLARE``; the first of ``words`` is its name.

        Raises ``ConfigError`` if an option changes the meaning of values, and the errors of ``assign``.
        """
        plain = [word.literal or "" for word in words if isinstance(word, Word)]
        options = [word for word in plain[1:] if word.startswith("-")]
        if plain[0] not in ("export", "readonly") and (changing := [item for item in options if set(item) & {*"nilu"}]):
            problem = "changes the meaning of an assignment, which is not supported: write the values out"
            raise ConfigError(f"{words[0].file_line}: {plain[0]} {changing[0]} {problem}")
        for item in words[1:]:
            self.assign(item, is_local=plain[0] == "local")

    def builtin(self, words: Sequence[Word]) -> bool:
        """Apply a builtin that sets variables and return True. Return False for any other command.

        Raises the errors of ``Scope.expand`` for the words of ``set`` and ``shift``.
        """
        match words[0].literal:
            case "unset":
                for word in words[1:]:
                    self._unset(word)
            case "let":
                for word in words[1:]:
                    self._compute("".join(part.text for part in word.parts), word.file_line)
            case "printf" if len(words) > 2 and words[1].literal == "-v":
                self.scope.taint((words[2].literal or "").partition("[")[0], f"is printed into at {words[0].file_line}")
            case name if name in READ:
                self.taint(words[1:])
            case "set" | "shift":
                self._set_arguments(words)
            case _:
                return False
        return True

    def taint(self, words: Sequence[Token]) -> None:
        """Mark the variables named by ``words`` as unknown."""
        for word in words:
            if isinstance(word, Word) and re.fullmatch(r"[A-Za-z_]\w*", word.literal or ""):
                reason = f"is set {self.condition_text}" if self.condition_text else f"is read at {word.file_line}"
                self.scope.taint(word.literal or "", reason)

    def _unset(self, word: Word) -> None:
        name, bracket, _ = (word.literal or "").partition("[")
        if self.condition_text or bracket:
            self.scope.taint(name, f"is unset {self.condition_text or f'in part at {word.file_line}'}")
        else:
            self.scope.assign(name, ())

    def _compute(self, text: str, file_line: str) -> None:
        """Taint the variables that an arithmetic expression sets."""
        for names in _COMPUTED.findall(text):
            self.scope.taint("".join(names), f"is computed at {file_line}")

    def _expansions(self, word: Word) -> None:
        for part in word.parts:
            if part.kind == "arithmetic":
                self._compute(part.text, word.file_line)
            if part.kind != "variable" or (match := _SET_IF_UNSET.match(part.text)) is None:
                continue
            values = self.scope.lookup(match[1], word.file_line)
            if values and (values[0].text or values[0].problem or not match[2]):
                continue
            if self.condition_text:
                self.scope.taint(match[1], f"is set {self.condition_text}")
            else:
                self.scope.assign(match[1], (self.scope.text(Word((part,), word.file_line), self.script),))

    def _set_arguments(self, words: Sequence[Word]) -> None:
        """Apply ``set [options] [--] [words]`` or ``shift [n]``, which set the script's own arguments."""
        values = [value for word in words[1:] for value in self.scope.expand(word, self.script)]
        texts = [value.text for value in values]
        arguments = self.scope.lookup(ARGUMENTS, words[0].file_line)
        if problem := next((value.problem for value in values if value.problem), ""):
            self.scope.values[ARGUMENTS] = (Value("", words[0].file_line, problem),)
        elif words[0].literal == "shift":
            number = int(texts[0]) if texts and texts[0].isdecimal() else 1
            if self.condition_text and arguments:
                self.scope.taint(ARGUMENTS, f"is set {self.condition_text}")
            elif arguments and not arguments[0].problem and number <= len(arguments):
                self.scope.assign(ARGUMENTS, arguments[number:])
        else:
            index = 0
            while index < len(texts) and texts[index][:1] in "-+" and texts[index] not in ("--", "-", ""):
                index += 2 if texts[index].endswith("o") else 1
            has_end_mark = texts[index : index + 1] == ["--"]
            if not has_end_mark and index >= len(texts):
                return
            if self.condition_text:
                self.scope.taint(ARGUMENTS, f"is set {self.condition_text}")
            else:
                self.scope.assign(ARGUMENTS, tuple(values[index + has_end_mark :]))


def _without(word: Word, length: int) -> Word:
    """Return ``word`` without its first ``length`` characters, which belong to one part."""
    first = word.parts[0]
    shortened = type(first)(first.kind, first.text[length:], first.quoted)
    return Word((shortened, *word.parts[1:]), word.file_line)


def leading_assignments(words: Sequence[Token]) -> tuple[list[Word | Array], list[Word | Array]]:
    """Return the assignments that a command begins with, and its other words."""
    items = [word for word in words if not isinstance(word, Operator)]
    num_assignments = 0
    while num_assignments < len(items) and _is_assignment(items[num_assignments]):
        num_assignments += 1
    return items[:num_assignments], items[num_assignments:]


def _is_assignment(item: Word | Array) -> bool:
    if isinstance(item, Array):
        return True
    first = item.parts[0] if item.parts else None
    is_plain = first is not None and first.kind == "text" and not first.quoted and bool(_ASSIGNMENT.match(first.text))
    return is_plain or bool(_computed_element(item))


def _computed_element(item: Word) -> str:
    """Return NAME of ``NAME[$I]=word``, an element with a computed index; empty for any other word."""
    name_text = "".join(part.text if part.kind == "text" and not part.quoted else "$" for part in item.parts)
    match = _ELEMENT.match(name_text)
    return match[1] if match else ""


def plain_words(items: Sequence[Token]) -> list[Word]:
    """Return ``items`` without arrays and operators."""
    return [item for item in items if isinstance(item, Word)]


def names_of(assignments: Sequence[Word | Array]) -> Iterator[str]:
    """Yield the names of the variables that ``assignments`` set, except elements with a computed index."""
    for item in assignments:
        if isinstance(item, Array):
            yield item.name
        elif match := _ASSIGNMENT.match(item.parts[0].text):
            yield match[1]
