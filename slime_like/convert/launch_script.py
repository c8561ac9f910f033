"""The arguments that a launch script of slime gives to ``train.py``, found without running a line of it.

Read: assignments, arrays, ``source`` and the command that starts training. Not run: everything else. What is set where
it may or may not happen (inside ``if``, loops, functions, after ``&&``) counts as unknown, and is refused where it matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.convert.shell_values import Scope, Value
from slime_like.convert.shell_words import Array, Operator, Token, Word, tokens
from slime_like.errors import ConfigError

MAX_SOURCED = 32
TRAIN = ("train.py", "train_async.py")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?(\+?)=")
_NAMES_SET = re.compile(r"\b([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
_OPENERS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_BETWEEN = ("then", "else", "elif", "do", "!", "time", "function")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_READS = ("read", "mapfile", "readarray", "getopts")
_RUNNERS = ("python", "python3", "ray", "torchrun", "srun", "nohup", "exec", "env")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a script starts: ``train.py`` or ``train_async.py``, its arguments, and what else stood there."""

    script: Path
    program: str
    arguments: tuple[Value, ...]
    where: str
    sourced: tuple[Path, ...]
    skipped: tuple[str, ...]  # files that were left out on request
    commands: Mapping[str, int]  # other commands, not run: name -> how often


def read_launch(script: Path, *, given: Mapping[str, str], skip: Sequence[str] = ()) -> Launch:
    """Find the one training command of ``script``.

    ``given`` are variables that the script takes from outside (they win over its own); ``skip`` names sourced files to
    leave out, by their last path component or whole. Raises ``ConfigError`` with file and line on what cannot be read.
    """
    reader = _Reader(Scope(dict(given)), tuple(skip))
    reader.read(script)
    if not reader.found:
        raise ConfigError(f"{script} starts no {' or '.join(TRAIN)}: give the script that does")
    if len(reader.found) > 1:
        places = ", ".join(where for _, where, _ in reader.found)
        raise ConfigError(f"{script} starts training {len(reader.found)} times ({places}): keep one of them in a copy")
    program, where, arguments = reader.found[0]
    return Launch(script, program, arguments, where, tuple(reader.files[1:]), tuple(reader.skipped), reader.commands)


@dataclass(slots=True)
class _Reader:
    scope: Scope
    skip: tuple[str, ...]
    files: list[Path] = field(default_factory=list[Path])
    skipped: list[str] = field(default_factory=list[str])
    commands: dict[str, int] = field(default_factory=dict[str, int])
    found: list[tuple[str, str, tuple[Value, ...]]] = field(default_factory=list[tuple[str, str, tuple[Value, ...]]])

    def read(self, script: Path) -> None:
        """One file, and what it sources."""
        self.files.append(script)
        if len(self.files) > MAX_SOURCED:
            raise ConfigError(f"{script}: more than {MAX_SOURCED} files source one another")
        try:
            text = script.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{script} cannot be read ({error}): give a bash script") from error
        blocks: list[tuple[str, str]] = []  # (what closes it, where it began)
        for command, before, after in _commands(tokens(text, str(script))):
            uncertain = before in ("&&", "||", "|")
            self._command(command, blocks, script, uncertain=uncertain)
            _parentheses(command, after, blocks)
        if blocks:
            raise ConfigError(f"{blocks[-1][1]}: what begins here has no {blocks[-1][0]!r}")

    def _command(self, command: list[Token], blocks: list[tuple[str, str]], script: Path, *, uncertain: bool) -> None:
        words = list(command)
        loops = _keywords(words, blocks)
        inside = f"is set inside what begins at {blocks[-1][1]}" if blocks else ""
        inside = inside or ("is set only if another command succeeds" if uncertain else "")
        if loops:  # for NAME in ..., case WORD in ...
            self._taint_names(words[:1], inside)
            return
        for word in words:
            if isinstance(word, Operator):
                for name in _NAMES_SET.findall(word.text):
                    self.scope.taint(name, f"is computed at {word.where}")
        words = [word for word in words if not isinstance(word, Operator)]
        assignments, words = _leading_assignments(words)
        name = words[0].literal if words and isinstance(words[0], Word) else ""
        if name in ("source", "."):
            self._source(words, assignments, script, inside)
            return
        for item in assignments if not words else []:
            self._assign(item, script, inside)
        if words:
            self._run(name or "", words, script, inside)

    def _run(self, name: str, words: list[Word | Array], script: Path, inside: str) -> None:
        plain = [word for word in words if isinstance(word, Word)]
        if name in _DECLARE:
            for item in words[1:]:
                self._assign(item, script, inside)
        elif name == "unset":
            for word in plain[1:]:
                self.scope.assign(word.literal or "", ())
        elif name == "eval":
            raise ConfigError(f"{plain[0].where}: eval may set anything, and nothing is run here: write it out")
        elif name == "printf" and len(plain) > 2 and plain[1].literal == "-v":
            self.scope.taint(plain[2].literal or "", f"is printed into at {plain[0].where}")
        elif name in _READS:
            self._taint_names(plain[1:], inside)
        elif (at := _training(plain)) is not None:
            if inside:
                raise ConfigError(f"{plain[0].where}: training starts where it may or may not: it {inside[3:]}")
            arguments = tuple(value for word in plain[at + 1 :] for value in self.scope.expand(word, script))
            self.found.append((Path(plain[at].parts[-1].text).name, plain[0].where, arguments))
        elif name and re.fullmatch(r"[\w./-]+", name):
            self.commands[name] = self.commands.get(name, 0) + 1

    def _assign(self, item: Word | Array, script: Path, inside: str) -> None:
        if isinstance(item, Array):
            if inside:
                self.scope.taint(item.name, inside)
            else:
                self.scope.assign_array(item, script)
            return
        found = _ASSIGNMENT.match(item.parts[0].text) if item.parts and item.parts[0].kind == "text" else None
        if found is None:  # export NAME
            return
        name, index, append = found[1], found[2], bool(found[3])
        if inside:
            self.scope.taint(name, inside)
            return
        value = self.scope.text(_without(item, found.end()), script)
        if index is None:
            self.scope.assign_text(name, value, append=append)
        elif name not in self.scope.unreadable:
            values = list(self.scope.values.get(name, ()))
            values += [Value("", value.where)] * (int(index) + 1 - len(values)) if int(index) < 10_000 else []
            values[int(index)] = value
            self.scope.assign(name, tuple(values))

    def _source(self, words: list[Word | Array], assignments: list[Word | Array], script: Path, inside: str) -> None:
        word = words[1] if len(words) > 1 else None
        if not isinstance(word, Word):
            raise ConfigError(f"{words[0].where}: source without a file")
        value = self.scope.text(word, script)
        last = "".join(p.text for p in word.parts[-1:] if p.kind == "text").rpartition("/")[2]
        if self.skip and (Path(value.text).name in self.skip or value.text in self.skip or last in self.skip):
            self.skipped.append(f"{value.text or last} ({word.where})")
            self.scope.incomplete = True
            return
        leave = f"--skip {last or 'NAME'} leaves it out"
        if inside:
            raise ConfigError(f"{word.where}: a file is sourced, and whether is not known: it {inside[3:]}; {leave}")
        if value.problem:
            raise ConfigError(f"{word.where}: which file is sourced is not known: {value.problem}; {leave}")
        path = Path(value.text) if Path(value.text).is_absolute() else script.parent / value.text
        if not path.is_file():
            raise ConfigError(f"{word.where}: there is no {path} to source: put it there; {leave}")
        before = {name: self.scope.values.get(name) for name in _names(assignments)}
        for item in assignments:
            self._assign(item, script, "")
        self.read(path)
        for name, values in before.items():
            self.scope.values.pop(name, None)
            if values is not None:
                self.scope.values[name] = values

    def _taint_names(self, words: Sequence[Token], inside: str) -> None:
        for word in words:
            if isinstance(word, Word) and re.fullmatch(r"[A-Za-z_]\w*", word.literal or ""):
                self.scope.taint(word.literal or "", inside or f"is read at {word.where}")


def _commands(stream: Iterator[Token]) -> Iterator[tuple[list[Token], str, str]]:
    """Simple commands, each with the operator before and after it."""
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


def _parentheses(command: list[Token], after: str, blocks: list[tuple[str, str]]) -> None:
    if after == "(":
        blocks.append((")", command[-1].where))
    elif after == ")" and blocks and blocks[-1][0] == ")":
        blocks.pop()


def _keywords(words: list[Token], blocks: list[tuple[str, str]]) -> bool:
    """Take bash's grammar off the front of a command; True for the head of a loop or ``case``, and for its patterns."""
    closing = words and isinstance(words[-1], Operator) and words[-1].text == ")"
    if words and isinstance(words[-1], Operator) and words[-1].text in "()":
        words.pop()
    ends = bool(words) and isinstance(words[0], Word) and words[0].keyword == "esac"
    if closing and blocks and blocks[-1][0] == "esac" and not ends:
        words.clear()  # a pattern
    while words and isinstance(words[0], Word):
        word = words[0].keyword
        if word in _OPENERS:
            blocks.append((_OPENERS[word], words[0].where))
            words.pop(0)
            if word in ("for", "select", "case"):
                if word == "case":
                    words.clear()
                return True
        elif word in _BETWEEN:
            words.pop(0)
        elif blocks and word == blocks[-1][0]:
            blocks.pop()
            words.pop(0)
        else:
            return False
    return False


def _leading_assignments(words: Sequence[Token]) -> tuple[list[Word | Array], list[Word | Array]]:
    items = [word for word in words if not isinstance(word, Operator)]
    at = 0
    while at < len(items) and _is_assignment(items[at]):
        at += 1
    return items[:at], items[at:]


def _is_assignment(item: Word | Array) -> bool:
    if isinstance(item, Array):
        return True
    first = item.parts[0] if item.parts else None
    return first is not None and first.kind == "text" and not first.quoted and bool(_ASSIGNMENT.match(first.text))


def _names(items: Sequence[Word | Array]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Array):
            yield item.name
        elif found := _ASSIGNMENT.match(item.parts[0].text):
            yield found[1]


def _without(word: Word, length: int) -> Word:
    first = word.parts[0]
    cut = type(first)(first.kind, first.text[length:], first.quoted)
    return Word((cut, *word.parts[1:]), word.where)


def _training(words: list[Word]) -> int | None:
    """Where ``train.py`` stands in a command that starts it."""
    for at, word in enumerate(words):
        last = word.parts[-1] if word.parts else None
        if at and last is not None and last.kind == "text" and last.text.rpartition("/")[2] in TRAIN:
            runner = (words[0].literal or "").rpartition("/")[2]
            if runner.startswith(_RUNNERS) or words[0].literal is None:
                return at
    return None
