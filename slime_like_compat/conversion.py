"""Final steps of a conversion: compose the configuration, write the recipe, print the report, return the exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.load.loader import load_config
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like_compat.conversion_rows import Mapped, Row, refusal_message
from slime_like_compat.recipe_file import plan_command, report, save_recipe
from slime_like_compat.shell.launch_script import Launch

SAME, CODE, NONE = 0, 1, 2
"""Exit codes: a recipe of the same job; a recipe that needs user code to be ported; no recipe."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Outcome of a conversion."""

    code: int  # SAME, CODE or NONE
    report: str
    rows: tuple[Row, ...]
    problem: str = ""  # why there is no recipe


def compose(overrides: Sequence[str], rows: Sequence[Row], hint: str, *, project: str, sign: str) -> TrainConfig:
    """Return the configuration that the ``overrides`` of a converted job compose to.

    Raises ``ConfigError`` if they do not compose. Its message ends with ``hint``, then one line for each setting of the job or
    default of ``project`` that sets a config key named in the error. ``sign`` separates the setting's name and value there.
    """
    try:
        return load_config(overrides, files=False, machine=False, code=False)
    except ConfigError as error:
        keys = set(re.findall(r"[a-z]+(?:\.\w+)+", str(error)))
        settings = [row for row in rows if keys & set(row.keys) and (row.file_line or row.verdict == "default")]
        lines = "".join(
            f"\n  {row.file_line or f'{project} default'}: {row.flag}{sign}{row.value_text}"
            for row in settings
            if row.verdict in ("mapped", "default", "code")
        )
        raise ConfigError(f"{error}\n{hint}:{lines}") from error


def save_conversion(mapped: Mapped, launch: Launch, path: Path, project: str, *, force: bool) -> Conversion:
    """Write the recipe of a job to ``path`` unless settings block it, and return the outcome.

    Raises the errors of ``save_recipe``.
    """
    if mapped.config is None:
        return Conversion(NONE, report(mapped, launch, None), mapped.rows, refusal_message(mapped.blocked))
    save_recipe(mapped, launch, path, project, force=force)
    text = f"{report(mapped, launch, path)}\n{plan_command(path)}"
    return Conversion(CODE if mapped.rows_with(["code"]) else SAME, text, mapped.rows)


def parse_assignments(flag: str, texts: Iterable[str], *, dotted: bool = False) -> dict[str, str]:
    """Parse ``texts``, the values of the option ``flag``, into a dict from names to values. ``dotted`` allows dots in names.

    Raises ``ConfigError`` for a text that is not an assignment.
    """
    name = re.compile(r"[A-Za-z_][\w.]*" if dotted else r"[A-Za-z_]\w*")
    assignments = [text.partition("=") for text in texts]
    for key, equals, value in assignments:
        if not equals or not name.fullmatch(key):
            raise ConfigError(f"{flag} {key}{equals}{value}: write {'KEY' if dotted else 'NAME'}=VALUE")
    return {key: value for key, _, value in assignments}


def print_conversion(convert: Callable[[], Conversion | str]) -> int:
    """Call ``convert``, print the report of one job or the table of many jobs that it returns, and return the exit code.

    The code is that of the ``Conversion``, whose ``problem`` is printed to stderr, or ``SAME`` for a table. If ``convert`` raises
    a ``SlimeLikeError``, the error is printed to stderr and the code is ``NONE``.
    """
    try:
        outcome = convert()
    except SlimeLikeError as error:
        sys.stderr.write(complaint(error))
        return NONE
    if isinstance(outcome, str):
        sys.stdout.write(visible(outcome))
        return SAME
    sys.stdout.write(visible(outcome.report))
    if outcome.problem:
        sys.stderr.write(visible(f"ConfigError: {outcome.problem}\n"))
    return outcome.code
