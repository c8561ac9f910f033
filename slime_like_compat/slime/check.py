"""Conversion of all launch scripts of slime below a folder, to count and list the outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slime_like.errors import CheckpointError, ConfigError
from slime_like_compat.outcome_table import class_table, first_line, may_contain, outcome
from slime_like_compat.shell.launch_script import TRAIN, read_launch
from slime_like_compat.shell.lookup import script_text
from slime_like_compat.slime.job import convert_script
from slime_like_compat.temporary_folder import temporary_folder

CLASSES = {
    "same": "a recipe of the same job",
    "code": "a recipe of the same job, once the functions that it names are ported",
    "value": "no recipe: values from the environment are needed (--set)",
    "refused": "no recipe: flags without a counterpart, each named (--drop)",
    "config": "no recipe: its settings do not compose to a configuration",
    "python": "a Python launcher: one line prints its command line",
    "unread": "no recipe: the script cannot be read",
}


def check_folder(folder: Path, *, variables: Mapping[str, str] | None = None) -> str:
    """Return a table that counts the launch scripts below ``folder`` by outcome, followed by a line for each script.

    ``variables`` (``--set``) apply to every script. Raises ``ConfigError`` if there is no launch script, and the error of
    ``temporary_folder``.
    """
    scripts = [path for path in sorted([*folder.rglob("*.sh"), *folder.rglob("*.py")]) if _starts_training(path)]
    if not scripts:
        raise ConfigError(f"{folder} has no script that starts {' or '.join(TRAIN)}: give the folder of launch scripts")
    return class_table(folder, CLASSES, {path: _classify(path, variables or {}) for path in scripts})


def _starts_training(path: Path) -> bool:
    """Return True if a shell script names ``train.py`` or ``train_async.py``, or a Python script calls miles' launcher.

    A file that cannot be read counts as such a script.
    """
    return may_contain(path, r"\b(train|train_async)\.py\b" if path.suffix == ".sh" else r"\bU\.execute_train\(")


def _classify(path: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the outcome of a script and its reason.

    The outcome is a key of ``CLASSES``. The reason is empty for ``same`` and ``python``.
    """
    try:
        script_text(path)
        if path.suffix == ".py":
            return "python", ""
        read_launch(path, variables=variables)
    except ConfigError as error:
        return "unread", first_line(error, path)
    with temporary_folder() as folder:
        try:
            return outcome(convert_script(path, folder / "recipe" / "a.yaml", variables=variables), " ")
        except (ConfigError, CheckpointError) as error:
            return "config", first_line(error, path)
