"""A launch script or YAML file of verl -> a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_like_compat.conversion_rows import in_the_way
from slime_like_compat.recipe_file import plan_command, recipe_path, report, save_recipe
from slime_like_compat.slime.job import CODE, NONE, SAME, Converted
from slime_like_compat.verl.launch import read_verl
from slime_like_compat.verl.mapping import map_settings


@dataclass(frozen=True, slots=True)
class VerlSource:
    """A job as ``read_verl`` takes it."""

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
) -> Converted:
    """Read a job and write its recipe; ``ours`` and ``drop`` are those of ``map_settings``.

    Raises ``ConfigError`` where it cannot be read or no configuration says it.
    """
    launch, settings = read_verl(
        source.job, source.extra, variables=source.variables, skip=source.skip, config=source.config
    )
    path = recipe_path(source.job, out, "verl")
    mapped = map_settings(settings, run_name=path.stem, user_overrides=user_overrides, drop=drop)
    if mapped.config is None:
        return Converted(NONE, report(mapped, launch, None), mapped.rows, in_the_way(mapped.blocked))
    save_recipe(mapped, launch, path, "verl", force=force)
    report_text = f"{report(mapped, launch, path)}\n{plan_command(path)}"
    return Converted(CODE if mapped.of(["code"]) else SAME, report_text, mapped.rows)
