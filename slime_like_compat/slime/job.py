"""A launch script of slime or miles -> a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like_compat.conversion_rows import Row, in_the_way
from slime_like_compat.recipe_file import plan_command, recipe_path, report, save_recipe
from slime_like_compat.shell.launch_script import read_launch
from slime_like_compat.slime.mapping import map_arguments

SAME, CODE, NONE = 0, 1, 2
"""Exit codes: a recipe of the same job; one that waits for code of the user's; no recipe."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Outcome of a conversion."""

    code: int  # SAME, CODE or NONE
    report: str
    rows: tuple[Row, ...]
    problem: str = ""  # why there is no recipe


def convert_script(
    script: Path,
    out: Path | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    drop: Sequence[str] = (),
    force: bool = False,
) -> Converted:
    """Read ``script`` and write its recipe. Raises ``ConfigError`` where it cannot be read or no configuration says it."""
    launch = read_launch(script, variables=variables or {}, skip=skip)
    path = recipe_path(script, out, "slime")
    mapped = map_arguments(
        launch.arguments,
        run_name=path.stem,
        asynchronous=launch.program == "train_async.py",
        drop=drop,
        environment=launch.environment,
    )
    if mapped.config is None:
        return Converted(NONE, report(mapped, launch, None), mapped.rows, in_the_way(mapped.blocked))
    save_recipe(mapped, launch, path, "slime", force=force)
    report_text = f"{report(mapped, launch, path)}\n{plan_command(path)}"
    return Converted(CODE if mapped.of(["code"]) else SAME, report_text, mapped.rows)
