"""Branches of a bash script that can be decided without running a command: ``if``, ``case``, ``&&`` and ``||``.

``True``: the commands run; ``False``: they do not; ``None``: that depends on a command or on an unknown variable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from slime_like.convert.shell_values import Scope, Value
from slime_like.convert.shell_words import Operator, Token, Word

_OPENERS = {"for": "done", "while": "done", "until": "done", "select": "done", "{": "}"}
_BETWEEN = ("then", "else", "elif", "do", "!", "time", "function")
_ENDS = {"[": "]", "[[": "]]", "test": ""}
_SAME, _OTHER = ("=", "=="), "!="
_NUMBERS = ("-eq", "-ne", "-gt", "-ge", "-lt", "-le")


@dataclass(slots=True)
class Block:
    """Commands between two words of bash's grammar, such as ``if`` and ``fi``."""

    closer: str
    where: str  # file:line of its first word
    runs: bool | None = None  # whether the commands at this place of the block run
    testing: bool = False  # between `if` and `then`
    result: bool | None = True  # of the commands between them
    earlier: bool | None = False  # whether an earlier branch ran
    subject: Value | None = None  # the word of `case`
    patterns: list[Word] | None = None  # of the branch of `case` that begins here
    opaque: bool = False  # whether the condition holds a loop or a subshell
    outer: tuple[str, bool | None] | None = None  # of `{`: the operator before it, and the result before that
    names: list[str] = field(default_factory=list[str])  # of variables in the condition

    def then(self) -> None:
        """Enter the branch whose condition was read."""
        self.testing = False
        self.result = None if self.opaque else self.result
        self.runs = both(negated(self.earlier), self.result)
        self.earlier = either(self.earlier, self.result)

    def otherwise(self, *, test: bool) -> None:
        """Enter ``else``, or the condition of ``elif``."""
        self.testing, self.result, self.opaque = test, True, False
        self.runs = negated(self.earlier)

    def matched(self, scope: Scope, script: Path) -> None:
        """Enter the branch of ``case`` whose patterns were read."""
        found: bool | None = False
        for pattern in self.patterns or ():
            value = scope.text(pattern, script)
            unknown = bool(value.problem) or self.subject is None or bool(self.subject.problem)
            here = None if unknown or self.subject is None else fnmatchcase(self.subject.text, value.text)
            found = either(found, True if pattern.literal == "*" else here)
        self.patterns = None
        self.result = found
        self.then()


@dataclass(slots=True)
class Branches:
    """The blocks that a place of the script lies in, and the result of its last command."""

    blocks: list[Block] = field(default_factory=list[Block])
    status: bool | None = None

    @property
    def last(self) -> Block | None:
        return self.blocks[-1] if self.blocks else None

    @property
    def runs(self) -> bool | None:
        """Whether commands here run, as far as blocks say."""
        states = [block.runs for block in self.blocks]
        return False if False in states else (None if None in states else True)

    @property
    def reason(self) -> str:
        """The block that nobody can decide, as messages name it: ``inside what begins at run.sh:3``."""
        unknown = [block for block in self.blocks if block.runs is None]
        if not unknown:
            return ""
        decides = f", which --set {unknown[-1].names[0]}=VALUE may decide" if unknown[-1].names else ""
        return f"inside what begins at {unknown[-1].where}{decides}"

    def connected(self, before: str) -> bool | None:
        """Whether a command after the operator ``before`` runs, as far as the command before it says."""
        match before:
            case "&&":
                return self.status
            case "||":
                return negated(self.status)
            case "|":
                return None
            case _:
                return True

    def record(self, before: str, result: bool | None, words: Sequence[Word]) -> None:
        """Keep the result of a command of ``words`` that stands after ``before``."""
        match before:
            case "&&":
                self.status = both(self.status, result)
            case "||":
                self.status = either(self.status, result)
            case _:
                self.status = result
        if self.last is not None:
            self.last.names += variables(words) if self.last.testing or self.last.outer else []
            self.last.result = self.status if self.last.testing else self.last.result

    def open(self, block: Block) -> None:
        """Enter a block. A condition that holds one is not decided, but by the commands of ``{ ...; }``."""
        if self.last is not None and self.last.testing and block.outer is None:
            self.last.opaque = True
        self.blocks.append(block)

    def close(self) -> None:
        """Leave the innermost block; the result of ``{ ...; }`` is that of its last command."""
        block, result = self.blocks.pop(), self.status
        self.status = None
        if block.outer is not None:
            before, self.status = block.outer
            self.record(before, result, ())
            if self.last is not None and self.last.testing:
                self.last.names += block.names


def both(a: bool | None, b: bool | None) -> bool | None:
    """``a && b``, where None is unknown."""
    return False if False in (a, b) else (None if None in (a, b) else True)


def either(a: bool | None, b: bool | None) -> bool | None:
    """``a || b``, where None is unknown."""
    return True if True in (a, b) else (None if None in (a, b) else False)


def negated(a: bool | None) -> bool | None:
    """``! a``, where None is unknown."""
    return None if a is None else not a


def variables(words: Sequence[Word]) -> list[str]:
    """Names of the variables in ``words``."""
    texts = [part.text for word in words for part in word.parts if part.kind == "variable"]
    return [found[0] for text in texts if (found := re.match(r"[A-Za-z_]\w*", text))]


def decide(words: Sequence[Word], scope: Scope, script: Path) -> bool | None:
    """Return the result of ``[ ... ]``, ``[[ ... ]]``, ``test``, ``true`` or ``false``; None of any other command."""
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
    turned = bool(inner) and inner[0].keyword == "!"
    result = _test(inner[turned:], scope, script, patterns=name == "[[")
    return negated(result) if turned else result


def _test(words: Sequence[Word], scope: Scope, script: Path, *, patterns: bool) -> bool | None:
    values = [scope.text(word, script) for word in words]
    if any(value.problem for value in values) or not 1 <= len(values) <= 3:
        return None
    texts = [value.text for value in values]
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2:
        return bool(texts[1]) == (texts[0] == "-n") if texts[0] in ("-n", "-z") else None
    left, sign, right = texts
    if sign in (*_SAME, _OTHER):
        plain = all(part.quoted for part in words[2].parts) or not patterns
        same = left == right if plain else fnmatchcase(left, right)
        return same == (sign in _SAME)
    if sign in _NUMBERS and all(text.lstrip("+-").isdigit() for text in (left, right)):
        a, b = int(left), int(right)
        return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[sign]
    return None


def parentheses(command: Sequence[Token], after: str, branches: Branches) -> None:
    """Open or close the block of a parenthesis that ends ``command``."""
    if after == "(":
        branches.open(Block(")", command[-1].where))
    elif after == ")" and branches.last is not None and branches.last.closer == ")":
        branches.blocks.pop()


def keywords(words: list[Token], before: str, branches: Branches, scope: Scope, script: Path) -> str:
    """Take bash's grammar off the front of a command that stands after the operator ``before``.

    Return ``loop`` for the head of a loop, ``pattern`` for what stands before a branch of ``case``, ``!`` for a command
    whose result is turned round, and an empty text for any other.
    """
    blocks = branches.blocks
    closing = bool(words) and isinstance(words[-1], Operator) and words[-1].text == ")"
    if words and isinstance(words[-1], Operator) and words[-1].text in "()":
        words.pop()
    turned, function = "", before == ")"  # f() { ... }
    if _is_pattern(words, branches.last):
        _take_patterns(words, blocks[-1], closing, scope, script)
        return "pattern"
    while words and isinstance(words[0], Word):
        word = words[0].keyword
        if word == "if":
            branches.open(Block("fi", words[0].where, runs=True, testing=True))
        elif word == "case":
            _open_case(words, branches, scope, script)
            _take_patterns(words, blocks[-1], closing, scope, script)
            return "pattern"
        elif word == "{" and not function:
            runs = branches.connected(before)
            branches.open(Block("}", words[0].where, runs=runs, outer=(before, branches.status)))
            before = ""
        elif word in _OPENERS:
            branches.open(Block(_OPENERS[word], words[0].where))
            if word in ("for", "select"):
                words.pop(0)
                return "loop"
        elif word in _BETWEEN:
            _enter(word, branches.last)
            turned = "!" if word == "!" else turned
            function = function or word == "function"
            del words[: int(word == "function")]  # and its name below
        elif blocks and word == blocks[-1].closer:
            branches.close()
        else:
            break
        del words[:1]
    return turned


def _open_case(words: list[Token], branches: Branches, scope: Scope, script: Path) -> None:
    """Take ``case WORD in`` off the front of a command."""
    subject = words[1] if len(words) > 1 else None
    value = scope.text(subject, script) if isinstance(subject, Word) else None
    names = variables([subject]) if isinstance(subject, Word) else []
    branches.open(Block("esac", words[0].where, runs=False, subject=value, patterns=[], names=names))
    del words[:3]


def _is_pattern(words: Sequence[Token], block: Block | None) -> bool:
    """Whether a command that stands at the begin of a branch of ``case`` is its pattern."""
    if block is None or block.patterns is None:
        return False
    return not (words and isinstance(words[0], Word) and words[0].keyword == "esac")


def _take_patterns(words: list[Token], block: Block, closing: bool, scope: Scope, script: Path) -> None:
    if block.patterns is not None:
        block.patterns += [word for word in words if isinstance(word, Word)]
        if closing:
            block.matched(scope, script)
    words.clear()


def _enter(word: str, block: Block | None) -> None:
    if block is not None and block.closer == "fi":
        if word == "then":
            block.then()
        elif word in ("else", "elif"):
            block.otherwise(test=word == "elif")
