"""Conversion of a launch script of slime or miles to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_like_compat.conversion import Conversion, save_conversion
from slime_like_compat.recipe_file import recipe_path
from slime_like_compat.shell.launch_script import read_launch
from slime_like_compat.slime.mapping import map_arguments


def convert_script(
    script: Path,
    out: Path | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    drop: Sequence[str] = (),
    force: bool = False,
) -> Conversion:
    """Read ``script``, write its recipe to ``out`` unless a setting blocks it, and return the outcome.

    ``recipe_path`` gives the file if ``out`` is None, ``read_launch`` describes ``variables`` and ``skip``, and
    ``map_arguments`` describes ``drop``. Functions that the script names are imported. Raises ``ConfigError`` if the script
    cannot be read, or its settings cannot be translated or do not compose. Also raises the errors of ``recipe_path`` for
    ``out``, and of ``save_recipe`` for the file, which it overwrites only if ``force``.
    """
    launch = read_launch(script, variables=variables or {}, skip=skip)
    path = recipe_path(script, out, "slime")
    mapped = map_arguments(
        launch.arguments,
        run_name=path.stem,
        asynchronous=launch.program == "train_async.py",
        drop=drop,
        environment=launch.environment,
    )
    return save_conversion(mapped, launch, path, "slime", force=force)
