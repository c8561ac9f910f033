"""Arguments that a launch script passes to its training command, read without running the script.

Assignments, arrays, ``source`` and the training command are read; no command is run. ``if``, ``case``, ``&&`` and
``||`` are followed if variables decide them, and variables of a subshell are dropped at its end. A variable that is set
under any other condition, in a loop or in a function is unknown; an argument that needs it has a ``problem``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.lookup import script_text
from slime_like_compat.shell.reader import ScriptReader
from slime_like_compat.shell.values import Scope, Value

TRAIN = ("train.py", "train_async.py")


@dataclass(frozen=True, slots=True)
class Launch:
    """Training command of a script, with its other commands and files."""

    script: Path
    program: str
    arguments: tuple[Value, ...]
    file_line: str
    sourced: tuple[Path, ...]
    skipped: tuple[str, ...]  # files skipped on request
    commands: Mapping[str, int]  # number of times that each other command occurs, by name; they are not run
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # from --runtime-env-json
    notes: tuple[str, ...] = ()  # on files that were missing or read from another folder


def read_launch(
    script: Path, *, variables: Mapping[str, str], skip: Sequence[str] = (), programs: Sequence[str] = TRAIN
) -> Launch:
    """Return the training command of ``script``, which must contain exactly one.

    ``variables`` (``--set``) override the script's; ``skip`` names sourced files to leave out, by file name
    or path; ``programs`` are files, or modules that ``python -m`` runs. Raises ``ConfigError`` if ``script`` is a Python
    launcher, does not start training exactly once, or cannot be read. The error for an unreadable part names file and line.
    """
    if script.suffix == ".py":
        raise ConfigError(python_launcher(script, script_text(script)))
    reader = ScriptReader(Scope(dict(variables)), tuple(skip), tuple(programs))
    try:
        reader.read(script)
    except RecursionError as error:
        raise ConfigError(
            f"{script}: its blocks and the files that it sources are nested too deeply: nest fewer in a copy of the script"
        ) from error
    if not reader.starts:
        raise ConfigError(f"{script} starts no {' or '.join(programs)}: give the script that starts it")
    if len(reader.starts) > 1:
        file_lines = ", ".join(start.file_line for start in reader.starts)
        raise ConfigError(
            f"{script} starts training {len(reader.starts)} times ({file_lines}): keep one start in a copy of the script"
        )
    start = reader.starts[0]
    return Launch(
        script,
        start.program,
        start.arguments,
        start.file_line,
        tuple(reader.files[1:]),
        tuple(reader.skipped),
        reader.commands,
        reader.environment,
        tuple(reader.notes),
    )


def python_launcher(script: Path, text: str) -> str:
    """Return the error message for a Python launcher of miles or slime, with a command that prints the launcher's commands."""
    match = re.search(r"import ([\w.]+\.command_utils) as U", text)
    commands = match[1] if match else "miles.utils.external_utils.command_utils"
    patch = (
        f"import {commands} as U; U.exec_command_cpu = U.exec_command_gpu = lambda command, **_: print(command) or '0'"
    )
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return (
        f"{script} builds its command line when it runs. In its checkout, this line prints its commands without running them: "
        f'python -c "{patch}; {run}" {script} > launch.sh; give launch.sh'
    )
