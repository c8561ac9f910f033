"""Recipe (YAML) and report (plain text) of a converted job."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from slime_like.config.load.loader import load_config
from slime_like.config.schema.known import free_root
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import BLOCKING, VERDICTS, Mapped, Row
from slime_like_compat.shell.launch_script import Launch
from slime_like_compat.temporary_folder import temporary_folder


def recipe_path(script: Path, out: Path | None, project: str) -> Path:
    """Return ``out`` or, if it is None, from_<project>/recipe/<name>.yaml with a name made from that of ``script``.

    Raises ``ConfigError`` if ``out`` is not a .yaml file in a folder named recipe, where Hydra finds it.
    """
    name = re.sub(r"\W+", "_", script.stem.removeprefix("run-").removeprefix("run_")).strip("_").lower() or "run"
    path = out or Path(f"from_{project}") / "recipe" / f"{name}.yaml"
    if path.parent.name != "recipe" or path.suffix != ".yaml":
        raise ConfigError(
            f"--out {path}: a recipe is a .yaml file in a folder named recipe, such as my_configs/recipe/{name}.yaml"
        )
    return path


def save_recipe(mapped: Mapped, launch: Launch, path: Path, project: str, *, force: bool) -> None:
    """Write the recipe to ``path`` after checking that it composes to ``mapped.config``, which must not be None.

    Raises ``ConfigError`` if the file exists and ``force`` is false, if the check fails, or if the file cannot be written,
    and the error of ``temporary_folder``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        exists = path.exists()
    except OSError as error:
        raise _unwritable(path, error) from error
    if exists and not force:
        raise ConfigError(f"{path} exists: give another --out, or --force to replace it")
    text = recipe_text(mapped, launch, project)
    trial = Path("recipe", path.name)
    with temporary_folder(str(trial), text) as folder:
        if load_config(_arguments(folder / trial), files=False, machine=False, code=False) != mapped.config:
            raise ConfigError(
                f"{path} does not compose to the configuration of {launch.script}, which is a bug: please report it"
            )
    try:
        path.write_text(text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {path} cannot be written ({error.strerror}): name another file")


def plan_command(path: Path) -> str:
    """Return two lines for the user: a command that prints the plan of a recipe, and a remark about ``--plan-for``."""
    command = " ".join(_arguments(path))
    return f"python train.py {command} --plan\n(--plan-for 8xNAME in place of --plan: the plan for a machine with 8 GPUs of that name)\n"


def _arguments(path: Path) -> list[str]:
    return ["--config-dir", str(path.parent.parent), f"+recipe={path.stem}"]


def recipe_text(mapped: Mapped, launch: Launch, project: str = "slime") -> str:
    """Return the recipe: every key that the job sets, with a comment that names its setting or default in ``project``.

    The algorithm, and a key that comes from neither, such as run.name, have no comment. ``mapped.config`` must not be None.
    """
    return "\n".join(_lines(mapped, launch, project)) + "\n"


def key_values(mapped: Mapped) -> dict[str, Any]:
    """Return the value of each key that the recipe sets, except ``algo`` and ``algo.name``; empty if ``mapped.config`` is None.

    A mapping with free keys (``free_root``) is flattened to one dotted key per item.
    """
    if mapped.config is None:
        return {}
    tree: dict[str, Any] = dataclasses.asdict(mapped.config)
    values: dict[str, Any] = {}
    for text in mapped.overrides:
        key = text.partition("=")[0]
        if key in ("algo", "algo.name"):
            continue
        value: Any = tree
        root = free_root(key)
        for name in (root or key).split("."):
            value = value[name]
        if root is not None and key == root:
            values |= {f"{root}.{name}": item for name, item in value.items()}
        else:
            values[key] = value if root is None else value[key[len(root) + 1 :]]
    return values


def _report_values(mapped: Mapped) -> dict[str, Any]:
    """Return the values for the report: those of ``key_values``, and the algorithm; empty if ``mapped.config`` is None."""
    return {} if mapped.config is None else {"algo": mapped.config.algo.name, **key_values(mapped)}


def _lines(mapped: Mapped, launch: Launch, project: str) -> Iterator[str]:
    assert mapped.config is not None, "a job with blocking settings has no recipe"
    yield "# @package _global_"
    yield f"# {launch.script.name} of {project}, translated by scripts/from_{project}.py. Its report lists the settings that were left out."
    yield "defaults:"
    yield f"  - override /algo: {mapped.config.algo.name}"
    flags = {key: row for row in mapped.rows for key in row.keys if row.verdict in ("mapped", "default", "code")}
    tree: dict[str, Any] = {}
    for key, value in key_values(mapped).items():
        _put(tree, _path(key), (value, flags.get(key) or flags.get(free_root(key) or "")))
    yield from _tree_lines(tree, "", project)


def _path(key: str) -> list[str]:
    """Return the parts of a dotted key. In a mapping with free keys, the rest of the key is one part, dots included."""
    root = free_root(key)
    return [*root.split("."), key[len(root) + 1 :]] if root is not None else key.split(".")


def _put(tree: dict[str, Any], path: list[str], leaf: tuple[Any, Row | None]) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf


def _tree_lines(tree: dict[str, Any], indent: str, project: str) -> Iterator[str]:
    for name, item in tree.items():
        if isinstance(item, dict):
            yield f"{indent}{_scalar(name)}:"
            yield from _tree_lines(cast("dict[str, Any]", item), indent + "  ", project)
        else:
            value, row = item
            yield f"{indent}{_scalar(name)}: {_scalar(value)}" + (
                f" # {_origin(row, project)}" if row is not None else ""
            )


def _origin(row: Row, project: str) -> str:
    if row.verdict == "code":
        return f"{row.flag}: to be ported"
    return f"{project}'s default of {row.flag}" if row.verdict == "default" else row.flag


def _scalar(value: Any) -> str:
    """Return ``value`` as YAML, on one line unless a text in it has line breaks."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def report(mapped: Mapped, launch: Launch, recipe: Path | None) -> str:
    """Return the report on every setting as plain text. ``recipe`` is the file that was written, None if there is none."""
    return "\n".join(_report_lines(mapped, launch, recipe)) + "\n"


def _report_lines(mapped: Mapped, launch: Launch, recipe: Path | None) -> Iterator[str]:
    counts = {verdict: sum(row.verdict == verdict for row in mapped.rows) for verdict in VERDICTS}
    yield f"{launch.script} ({launch.program} at {launch.file_line}) -> {recipe or 'no recipe'}"
    yield ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number or verdict not in BLOCKING)
    values = _report_values(mapped)
    for verdict, meaning in VERDICTS.items():
        rows = [row for row in mapped.rows if row.verdict == verdict]
        if rows:
            yield ""
            yield f"{verdict}: {meaning}"
        for row in rows:
            source = row.file_line.rpartition("/")[2]
            setting = f"  {row.flag} {row.value_text}".rstrip()
            outcome = "; ".join(text for text in (row.text(values), row.note) if text)
            yield f"{setting}  ->  {outcome}" + (f"  [{source}]" if source else "")
    yield ""
    yield from launch.notes
    if names := ", ".join(launch.environment):
        yield f"environment variables of the job, to be set for train.py if needed: {names}"
    if launch.skipped:
        yield f"not read, because of --skip: {', '.join(launch.skipped)}"
    if launch.commands:
        other_commands = ", ".join(
            f"{name} ({times})" if times > 1 else name for name, times in launch.commands.items()
        )
        yield f"commands of the script that were not run and are not part of the recipe: {other_commands}"
