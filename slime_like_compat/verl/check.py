"""Conversion of all launch scripts of verl below a folder, to count and list the outcomes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.outcome_table import class_table, first_line, may_contain, outcome
from slime_like_compat.temporary_folder import temporary_folder
from slime_like_compat.verl.convert import VerlSource, convert_verl
from slime_like_compat.verl.launch import OTHERS, PROGRAMS

CLASSES = {
    "same": "a recipe of the same job",
    "code": "a recipe of the same job, once the functions that it names are ported",
    "refused": "no recipe: keys without a counterpart, each named (--drop, --with)",
    "value": "no recipe: values from the environment or from a command are needed (--set)",
    "config": "no recipe: a file of settings is needed, or its settings do not compose to a configuration",
    "program": "no recipe: another program of verl, named with the alternative",
    "unread": "no recipe: the script cannot be read",
}


def check_verl(folder: Path, *, variables: Mapping[str, str], user_overrides: Sequence[str]) -> str:
    """Return a table that counts the launch scripts below ``folder`` by outcome, followed by a line for each script.

    ``variables`` (``--set``) and ``user_overrides`` (``--with``) apply to every script. Raises ``ConfigError`` if there is no
    launch script, and the error of ``temporary_folder``.
    """
    names = "|".join(re.escape(name) for name in (*PROGRAMS, *OTHERS))
    scripts = [path for path in sorted(folder.rglob("*.sh")) if may_contain(path, names)]
    if not scripts:
        raise ConfigError(f"{folder} has no .sh that starts {PROGRAMS[0]}: give the folder of launch scripts")
    return class_table(folder, CLASSES, {path: _classify(path, variables, user_overrides) for path in scripts})


def _classify(path: Path, variables: Mapping[str, str], user_overrides: Sequence[str]) -> tuple[str, str]:
    """Return the outcome of a script and its reason.

    The outcome is a key of ``CLASSES``. The reason is empty for ``same``.
    """
    with temporary_folder() as folder:
        try:
            return outcome(
                convert_verl(
                    VerlSource(path, variables=variables),
                    folder / "recipe" / "a.yaml",
                    user_overrides=user_overrides,
                ),
                "=",
            )
        except ConfigError as error:
            return _class_of_error(str(error)), first_line(error, path)


def _class_of_error(text: str) -> str:
    """Return the outcome, a key of ``CLASSES``, of a script whose conversion raised an error with this text."""
    if "is not translated" in text:
        return "program"
    if "--set " in text or "no command is run" in text:
        return "value"
    return "config" if "--config FILE" in text or "The job sets these keys here" in text else "unread"
