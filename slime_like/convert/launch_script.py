"""The arguments that a launch script of slime gives to ``train.py``, found without running a line of it.

Read: assignments, arrays, ``source`` and the command that starts training. Not run: everything else. ``if``, ``case``,
``&&`` and ``||`` are followed where variables decide them; what is set where it may or may not happen (under any other
condition, in loops, in functions) counts as unknown, and is refused where it matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.convert.shell_branches import Branches, both, decide, keywords, negated, parentheses
from slime_like.convert.shell_values import ARGUMENTS, Scope, Value
from slime_like.convert.shell_words import Array, Operator, Token, Word, tokens
from slime_like.errors import ConfigError

MAX_SOURCED = 32
TRAIN = ("train.py", "train_async.py")
_MODEL_FILE = re.compile(r"(^|/)models/[\w.-]+\.sh$")  # slime's scripts/models/*.sh set MODEL_ARGS, and nothing else
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?(\+?)=")
_NAMES_SET = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SET_IF_UNSET = re.compile(r"([A-Za-z_]\w*)(:?)=")  # ${NAME:=word}
_VARIABLE = re.compile(r'"([A-Za-z_]\w*)"\s*:\s*"([^"]*)"')
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_READS = ("read", "mapfile", "readarray", "getopts")
_SETS = ("unset", "let", "set", "shift", "printf", *_READS)
_RUNNERS = ("python", "python3", "ray", "torchrun", "srun", "nohup", "exec", "env", "uv", "accelerate")


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
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # of --runtime-env-json, where it is written
    notes: tuple[str, ...] = ()  # about files that were read elsewhere or are not there


def read_launch(
    script: Path, *, given: Mapping[str, str], skip: Sequence[str] = (), programs: Sequence[str] = TRAIN
) -> Launch:
    """Find the one training command of ``script``.

    ``given`` are variables that the script takes from outside (they win over its own); ``skip`` names sourced files to
    leave out, by their last path component or whole; ``programs`` are files, or modules that ``python -m`` runs. Raises
    ``ConfigError`` with file and line on what cannot be read.
    """
    if script.suffix == ".py":
        raise ConfigError(python_launcher(script))
    reader = _Reader(Scope(dict(given)), tuple(skip), tuple(programs))
    reader.read(script)
    if not reader.found:
        raise ConfigError(f"{script} starts no {' or '.join(programs)}: give the script that does")
    if len(reader.found) > 1:
        places = ", ".join(where for _, where, _ in reader.found)
        raise ConfigError(f"{script} starts training {len(reader.found)} times ({places}): keep one of them in a copy")
    program, where, arguments = reader.found[0]
    return Launch(
        script,
        program,
        arguments,
        where,
        tuple(reader.files[1:]),
        tuple(reader.skipped),
        reader.commands,
        reader.environment,
        tuple(reader.notes),
    )


def python_launcher(script: Path) -> str:
    """The line that prints the commands of a Python launcher of miles or slime, in place of running them."""
    text = script.read_text(errors="replace") if script.is_file() else ""
    found = re.search(r"import ([\w.]+\.command_utils) as U", text)
    commands = found[1] if found else "miles.utils.external_utils.command_utils"
    patch = (
        f"import {commands} as U; U.exec_command_cpu = U.exec_command_gpu = lambda command, **_: print(command) or '0'"
    )
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return (
        f"{script} builds its command line when it runs. In its checkout this prints its commands and runs none: "
        f'python -c "{patch}; {run}" {script} > launch.sh; give launch.sh'
    )


@dataclass(slots=True)
class _Reader:
    scope: Scope
    skip: tuple[str, ...]
    programs: tuple[str, ...]
    files: list[Path] = field(default_factory=list[Path])
    skipped: list[str] = field(default_factory=list[str])
    commands: dict[str, int] = field(default_factory=dict[str, int])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
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
        branches = Branches()
        commands = list(_commands(tokens(text, str(script))))
        for (command, before, after), subshell in zip(commands, _subshells(commands), strict=True):
            self._command(list(command), before, branches, script, subshell)
            parentheses(command, after, branches)
            if after in (";;", ";&", ";;&") and (block := branches.last) is not None and block.closer == "esac":
                block.patterns = []
                block.runs = False
        if (block := branches.last) is not None:
            raise ConfigError(f"{block.where}: what begins here has no {block.closer!r}")

    def _command(self, words: list[Token], before: str, branches: Branches, script: Path, subshell: bool) -> None:
        grammar = keywords(words, before, branches, self.scope, script)
        runs = both(branches.runs, branches.connected(before))
        inside = ""
        trains = _training(_words(_leading_assignments(words)[1]), self.programs) is not None
        starts = before == "&&" and branches.runs and trains
        if runs is None and not starts:  # what stands before the command that starts training prepares it
            inside = branches.reason or "only if another command succeeds"
        if grammar == "loop":  # for NAME in ...
            if runs is not False:
                self._taint_names(words[:1], inside)
            return
        if grammar == "pattern":
            return
        plain = [word for word in words if isinstance(word, Word)]
        if words or grammar == "!":
            result = decide(plain, self.scope, script) if len(plain) == len(words) else None
            branches.record(before, negated(result) if grammar == "!" else result, plain)
        if subshell and not trains:  # what it sets is lost
            self._count(plain[0].literal or "" if plain else "")
        elif runs is not False:
            self._effects(words, script, inside)

    def _effects(self, words: list[Token], script: Path, inside: str) -> None:
        """Take what a command sets, sources or starts; ``inside`` says where it stands if it may not run at all."""
        for word in words:
            if isinstance(word, Operator):
                self._compute(word.text, word.where)
            for item in word.words if isinstance(word, Array) else [word] if isinstance(word, Word) else []:
                self._expansions(item, script, inside)
        assignments, rest = _leading_assignments(words)
        name = rest[0].literal if rest and isinstance(rest[0], Word) else ""
        if name in ("source", "."):
            self._source(rest, assignments, script, inside)
            return
        for item in assignments if not rest else []:
            self._assign(item, script, inside)
        if rest:
            self._run(name or "", rest, script, inside)

    def _compute(self, text: str, where: str) -> None:
        """Taint what an arithmetic expression sets."""
        for names in _NAMES_SET.findall(text):
            self.scope.taint("".join(names), f"is computed at {where}")

    def _expansions(self, word: Word, script: Path, inside: str) -> None:
        """Take what the expansions of a word set: ``${NAME:=word}`` and ``$((NAME++))``."""
        for part in word.parts:
            if part.kind == "arithmetic":
                self._compute(part.text, word.where)
            if part.kind != "variable" or (found := _SET_IF_UNSET.match(part.text)) is None:
                continue
            values = self.scope.lookup(found[1], word.where)
            if values and (values[0].text or values[0].problem or not found[2]):
                continue
            if inside:
                self.scope.taint(found[1], f"is set {inside}")
            else:
                self.scope.assign(found[1], (self.scope.text(Word((part,), word.where), script),))

    def _count(self, name: str) -> None:
        if name and re.fullmatch(r"[\w./-]+", name):
            self.commands[name] = self.commands.get(name, 0) + 1

    def _set_arguments(self, words: Sequence[Word], script: Path, inside: str) -> None:
        """Take ``set [options] [--] [words]`` or ``shift [n]``, which set the script's own arguments."""
        values = [value for word in words[1:] for value in self.scope.expand(word, script)]
        texts = [value.text for value in values]
        known = self.scope.lookup(ARGUMENTS, words[0].where)
        if problem := next((value.problem for value in values if value.problem), ""):
            self.scope.values[ARGUMENTS] = (Value("", words[0].where, problem),)
        elif words[0].literal == "shift":
            number = int(texts[0]) if texts and texts[0].isdigit() else 1
            if inside and known:
                self.scope.taint(ARGUMENTS, f"is set {inside}")
            elif known and not known[0].problem and number <= len(known):
                self.scope.assign(ARGUMENTS, known[number:])
        else:
            at = 0
            while at < len(texts) and texts[at][:1] in "-+" and texts[at] not in ("--", "-", ""):
                at += 2 if texts[at].endswith("o") else 1
            ends = texts[at : at + 1] == ["--"]
            if not ends and at >= len(texts):
                return
            if inside:
                self.scope.taint(ARGUMENTS, f"is set {inside}")
            else:
                self.scope.assign(ARGUMENTS, tuple(values[at + ends :]))

    def _run(self, name: str, words: list[Word | Array], script: Path, inside: str) -> None:
        plain = [word for word in words if isinstance(word, Word)]
        if name in _DECLARE:
            self._declare(name, plain, words, script, inside)
        elif name in _SETS:
            self._builtin(name, plain, script, inside)
        elif name == "eval":
            raise ConfigError(f"{plain[0].where}: eval may set anything, and nothing is run here: write it out")
        elif (at := _training(plain, self.programs)) is not None:
            if inside:
                raise ConfigError(f"{plain[0].where}: training starts {inside}, and whether it runs is not known")
            arguments = tuple(value for word in plain[at + 1 :] for value in self.scope.expand(word, script))
            for word in plain[:at]:
                self._environment(self.scope.text(word, script).text)
            self.found.append((Path(plain[at].parts[-1].text).name, plain[0].where, arguments))
        else:
            self._count(name)

    def _declare(self, name: str, plain: list[Word], words: list[Word | Array], script: Path, inside: str) -> None:
        options = [option for word in plain[1:] if (option := word.literal or "").startswith("-")]
        if changing := [option for option in options if name not in ("export", "readonly") and set(option) & {*"nilu"}]:
            why = "changes what an assignment means, which is not read: write the values out"
            raise ConfigError(f"{plain[0].where}: {name} {changing[0]} {why}")
        for item in words[1:]:
            self._assign(item, script, inside)

    def _builtin(self, name: str, plain: list[Word], script: Path, inside: str) -> None:
        """Take a command of bash that sets variables."""
        if name == "unset":
            for word in plain[1:]:
                variable = (word.literal or "").partition("[")[0]
                if inside or "[" in (word.literal or ""):
                    self.scope.taint(variable, f"is unset {inside or f'in part at {word.where}'}")
                else:
                    self.scope.assign(variable, ())
        elif name == "let":
            for word in plain[1:]:
                self._compute("".join(part.text for part in word.parts), word.where)
        elif name == "printf" and len(plain) > 2 and plain[1].literal == "-v":
            self.scope.taint((plain[2].literal or "").partition("[")[0], f"is printed into at {plain[0].where}")
        elif name in _READS:
            self._taint_names(plain[1:], inside)
        elif name in ("set", "shift"):
            self._set_arguments(plain, script, inside)
        else:
            self._count(name)

    def _environment(self, text: str) -> None:
        """The variables of ``--runtime-env-json=...``, also of JSON in which a value is not known."""
        if text.startswith("--runtime-env-json="):
            self.environment |= dict(_VARIABLE.findall(text))

    def _assign(self, item: Word | Array, script: Path, inside: str) -> None:
        if isinstance(item, Array):
            if inside:
                self.scope.taint(item.name, f"is set {inside}")
            else:
                self.scope.assign_array(item, script)
            return
        found = _ASSIGNMENT.match(item.parts[0].text) if item.parts and item.parts[0].kind == "text" else None
        if found is None:  # export NAME
            return
        name, index, append = found[1], found[2], bool(found[3])
        if inside:
            self.scope.taint(name, f"is set {inside}")
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
            raise ConfigError(f"{word.where}: a file is sourced {inside}, and whether it runs is not known; {leave}")
        path = self._sourced(value, script)
        if path is None and _MODEL_FILE.search(value.text):
            self.notes.append(
                f"{value.text} ({word.where}) is not there: its MODEL_ARGS describe the model, as config.json of "
                "--hf-checkpoint does"
            )
            self.scope.assign("MODEL_ARGS", ())
            return
        if path is None and value.problem:
            raise ConfigError(f"{word.where}: which file is sourced is not known: {value.problem}; {leave}")
        if path is None:
            raise ConfigError(f"{word.where}: there is no {value.text} to source: put it there; {leave}")
        arguments = [value for word in words[2:] if isinstance(word, Word) for value in self.scope.expand(word, script)]
        before = {name: self.scope.values.get(name) for name in _names(assignments)}
        if arguments:
            before[ARGUMENTS] = self.scope.values.get(ARGUMENTS)
            self.scope.assign(ARGUMENTS, tuple(arguments))
        for item in assignments:
            self._assign(item, script, "")
        self.read(path)
        for name, values in before.items():
            self.scope.values.pop(name, None)
            if values is not None:
                self.scope.values[name] = values

    def _sourced(self, value: Value, script: Path) -> Path | None:
        """The file that ``source`` names: as it is written, or by its last names in a folder above the script."""
        named = Path(value.text)
        path = named if named.is_absolute() else script.parent / named
        if not value.problem and path.is_file():
            return path
        names = [name for name in named.parts if name not in ("/", ".", "..")]
        folders = [script.resolve().parent, *script.resolve().parents]
        for length in range(len(names), 1, -1):
            for folder in folders:
                if (found := folder.joinpath(*names[-length:])).is_file():
                    self.notes.append(f"{value.text} is not there: {found} was read")
                    return found
        return None

    def _taint_names(self, words: Sequence[Token], inside: str) -> None:
        for word in words:
            if isinstance(word, Word) and word.literal == "MODEL_ARGS":
                self.notes.append(
                    f"MODEL_ARGS is read from a command ({word.where}): it describes the model, as config.json of "
                    "--hf-checkpoint does"
                )
                self.scope.assign("MODEL_ARGS", ())
            elif isinstance(word, Word) and re.fullmatch(r"[A-Za-z_]\w*", word.literal or ""):
                self.scope.taint(word.literal or "", f"is set {inside}" if inside else f"is read at {word.where}")


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


def _subshells(commands: Sequence[tuple[list[Token], str, str]]) -> list[bool]:
    """Return for each command whether it runs in a subshell: in the background, or before a pipe."""
    found: list[bool] = []
    background = False
    for command, before, after in reversed(commands):
        joined = after in ("&&", "||", "|") or (not command and before in ("&&", "||", "|"))
        background = after == "&" or (joined and background)
        found.append(background or after == "|")
    return found[::-1]


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


def _words(items: Sequence[Token]) -> list[Word]:
    return [item for item in items if isinstance(item, Word)]


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


def _training(words: list[Word], programs: Sequence[str]) -> int | None:
    """Where one of ``programs`` stands in a command that starts it."""
    for at, word in enumerate(words):
        last = word.parts[-1] if word.parts else None
        if not at or last is None or last.kind != "text":
            continue
        name = last.text if words[at - 1].literal == "-m" else last.text.rpartition("/")[2]
        runner = (words[0].literal or "").rpartition("/")[2]
        if name in programs and (runner.startswith(_RUNNERS) or words[0].literal is None):
            return at
    return None
