"""Reader of a launch script and the files that it sources; it follows their commands and collects the training commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.assignments import DECLARE, READ, Assignments, leading_assignments, names_of, plain_words
from slime_like_compat.shell.branches import Branches
from slime_like_compat.shell.lookup import find_file, is_elsewhere, script_text
from slime_like_compat.shell.parser import parse
from slime_like_compat.shell.values import ARGUMENTS, Scope, Value
from slime_like_compat.shell.words import Array, Token, Word

MAX_SOURCED = 32
_MODEL_FILE = re.compile(r"(^|/)models/[\w.-]+\.sh$")  # slime's scripts/models/*.sh set only MODEL_ARGS
_VARIABLE = re.compile(r'"([A-Za-z_]\w*)"\s*:\s*"([^"]*)"')
_RUNNERS = ("python", "python3", "ray", "torchrun", "srun", "nohup", "exec", "env", "uv", "accelerate")


@dataclass(frozen=True, slots=True)
class Start:
    """Command that starts training."""

    program: str
    file_line: str  # file:line
    arguments: tuple[Value, ...]


@dataclass(slots=True)
class ScriptReader:
    """Reader of a script's commands.

    ``scope`` holds the variables, ``skip`` and ``programs`` are those of ``read_launch``, and the other fields collect results.
    """

    scope: Scope
    skip: tuple[str, ...]
    programs: tuple[str, ...]
    files: list[Path] = field(default_factory=list[Path])
    skipped: list[str] = field(default_factory=list[str])
    commands: dict[str, int] = field(default_factory=dict[str, int])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    starts: list[Start] = field(default_factory=list[Start])

    def read(self, script: Path) -> None:
        """Read a file and the files it sources.

        Raises ``ConfigError`` if a file or a part of it cannot be read, or if too many files are sourced. The error for a part
        names its line. Raises ``RecursionError`` if blocks or sourced files are nested too deeply.
        """
        self.files.append(script)
        if len(self.files) > MAX_SOURCED:
            raise ConfigError(f"{script}: more than {MAX_SOURCED} files are sourced: leave some out with --skip FILE")
        text = script_text(script)
        branches = Branches(
            self.scope,
            script,
            lambda words, condition_text: self._effects(words, script, condition_text),
            starts=self._starts,
        )
        branches.follow(parse(text, str(script)))

    def _starts(self, words: Sequence[Token]) -> bool:
        return training(plain_words(leading_assignments(words)[1]), self.programs) is not None

    def _effects(self, words: Sequence[Token], script: Path, condition_text: str) -> None:
        """Apply a command: set its variables, read the file that it sources or record the training that it starts.

        Any other command is counted by its name. ``condition_text`` is the condition under which the command runs; empty if it
        always runs. Raises ``ConfigError`` for a command whose effect is not known, such as ``eval`` or a training that depends
        on a condition, for a word or sourced file that cannot be read, and as ``_check_continued`` does.
        """
        variables = Assignments(self.scope, script, condition_text)
        variables.expand(words)
        assignments, command = leading_assignments(words)
        name = command[0].literal if command and isinstance(command[0], Word) else ""
        if name in ("source", "."):
            self._source(command, assignments, script, condition_text)
            return
        for item in assignments if not command else []:
            variables.assign(item)
        if command:
            self._run(name or "", command, variables)

    def _count(self, name: str) -> None:
        if name and re.fullmatch(r"[\w./-]+", name):
            self.commands[name] = self.commands.get(name, 0) + 1

    def _run(self, name: str, words: list[Word | Array], variables: Assignments) -> None:
        plain, script = plain_words(words), variables.script
        if name in DECLARE:
            variables.declare(words)
        elif plain and variables.builtin(plain):
            if name in READ and any(word.literal == "MODEL_ARGS" for word in plain[1:]):
                self._clear_model_args(
                    f"MODEL_ARGS is read from a command ({plain[0].file_line}): it describes the model"
                )
        elif name == "eval":
            raise ConfigError(
                f"{plain[0].file_line}: eval may set any variable, and no command is run here: write the assignments out"
            )
        elif (program_index := training(plain, self.programs)) is not None:
            if variables.condition_text:
                raise ConfigError(
                    f"{plain[0].file_line}: training starts {variables.condition_text}, and "
                    "whether it runs is not known: remove the condition in a copy of the script"
                )
            arguments = tuple(value for word in plain[program_index + 1 :] for value in self.scope.expand(word, script))
            for word in plain[:program_index]:
                self._environment(self.scope.text(word, script).text)
            self.starts.append(Start(Path(plain[program_index].parts[-1].text).name, plain[0].file_line, arguments))
        else:
            self._check_continued(plain[:1], script)
            self._count(name)

    def _check_continued(self, words: list[Word], script: Path) -> None:
        """Raise ``ConfigError`` if a command after the training command begins with a variable whose value is an option.

        The line above then lacks a backslash at its end, and training would start without this option.
        """
        for word in words if self.starts else ():
            values = self.scope.expand(word, script) if word.literal is None else ()
            if values and values[0].text.startswith("--"):
                raise ConfigError(
                    f"{word.file_line}: a command begins with {values[0].text}, so training would start without the arguments "
                    "from this line on: end the line above with a backslash in a copy of the script"
                )

    def _clear_model_args(self, reason: str) -> None:
        """Clear MODEL_ARGS, the flags of a model's shape in slime; here config.json gives the shape.

        Add a note that begins with ``reason``.
        """
        self.notes.append(f"{reason}, as config.json of --hf-checkpoint does")
        self.scope.assign("MODEL_ARGS", ())

    def _environment(self, text: str) -> None:
        """Collect each ``"NAME": "text"`` of ``--runtime-env-json=...``, even if some values in the JSON are unknown."""
        if text.startswith("--runtime-env-json="):
            self.environment |= dict(_VARIABLE.findall(text))

    def _source(
        self, words: list[Word | Array], assignments: list[Word | Array], script: Path, condition_text: str
    ) -> None:
        word = words[1] if len(words) > 1 else None
        if not isinstance(word, Word):
            raise ConfigError(f"{words[0].file_line}: source without a file: name the file")
        value = self.scope.text(word, script)
        file_name = "".join(p.text for p in word.parts[-1:] if p.kind == "text").rpartition("/")[2]
        if self.skip and {Path(value.text).name, value.text, file_name} & {*self.skip}:
            self.skipped.append(f"{value.text or file_name} ({word.file_line})")
            self.scope.incomplete = True
            return
        skip_hint = f"--skip {file_name or 'NAME'} leaves it out"
        if condition_text:
            raise ConfigError(
                f"{word.file_line}: a file is sourced {condition_text}, and whether it runs is not known; {skip_hint}"
            )
        path = find_file(value, script)
        if path is not None and is_elsewhere(path, value, script):
            self.notes.append(f"{value.text} is not there: {path} was read")
        if path is None and _MODEL_FILE.search(value.text):
            self._clear_model_args(f"{value.text} ({word.file_line}) is not there: its MODEL_ARGS describe the model")
            return
        if path is None and value.problem:
            raise ConfigError(
                f"{word.file_line}: the name of the sourced file is unknown: {value.problem}; {skip_hint}"
            )
        if path is None:
            raise ConfigError(
                f"{word.file_line}: the sourced file {value.text} is missing or cannot be reached: put it there; {skip_hint}"
            )
        arguments = [value for word in words[2:] if isinstance(word, Word) for value in self.scope.expand(word, script)]
        with self.scope.restoring([*names_of(assignments), *([ARGUMENTS] if arguments else [])]):
            if arguments:
                self.scope.assign(ARGUMENTS, tuple(arguments))
            for item in assignments:
                Assignments(self.scope, script, "").assign(item, is_local=True)
            self.read(path)


def training(words: Sequence[Word], programs: Sequence[str]) -> int | None:
    """Return the index of the word that names the program if a command starts one of ``programs``, else None.

    The first word has to be a variable or a runner such as python or ray; the program's name is a later word.
    """
    for index, word in enumerate(words):
        last_part = word.parts[-1] if word.parts else None
        if not index or last_part is None or last_part.kind != "text":
            continue
        name = last_part.text if words[index - 1].literal == "-m" else last_part.text.rpartition("/")[2]
        runner = (words[0].literal or "").rpartition("/")[2]
        if name in programs and (runner.startswith(_RUNNERS) or words[0].literal is None):
            return index
    return None
