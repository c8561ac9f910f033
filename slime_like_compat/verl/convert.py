"""Conversion of a launch script or YAML file of verl to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like_compat.conversion import Conversion, save_conversion
from slime_like_compat.recipe_file import recipe_path
from slime_like_compat.verl.launch import read_verl
from slime_like_compat.verl.mapping import map_settings


@dataclass(frozen=True, slots=True)
class VerlSource:
    """Arguments of ``read_verl``: the job, and how to read it."""

    job: Path
    extra: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    skip: Sequence[str] = ()
    config: Path | None = None


def convert_verl(
    source: VerlSource,
    out: Path | None = None,
    *,
    user_overrides: Sequence[str] = (),
    drop: Sequence[str] = (),
    force: bool = False,
) -> Conversion:
    """Read a job, write its recipe unless settings block it, and return the outcome.

    ``user_overrides`` and ``drop`` are passed to ``map_settings``; ``recipe_path`` gives the file if ``out`` is None. Raises
    ``ConfigError`` if the job cannot be read, or its settings cannot be translated or do not compose. Also raises the errors of
    ``recipe_path`` for ``out``, and of ``save_recipe`` for the file, which it overwrites only if ``force``.
    """
    launch, settings = read_verl(
        source.job, source.extra, variables=source.variables, skip=source.skip, config=source.config
    )
    path = recipe_path(source.job, out, "verl")
    mapped = map_settings(settings, run_name=path.stem, user_overrides=user_overrides, drop=drop)
    return save_conversion(mapped, launch, path, "verl", force=force)
