"""A run's folder read back: its configuration and its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime_like.errors import DataError
from slime_like.metrics.log import LogRow, parse_row
from slime_like.util.reading import InputFile, reason

METRICS, CONFIG = "metrics.jsonl", "config.yaml"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as its folder tells it."""

    folder: Path
    config: Mapping[str, Any]  # the resolved configuration as a tree; empty where the folder has none
    rows: tuple[LogRow, ...]  # by step
    notes: tuple[str, ...]  # what could not be read, and was left out

    @property
    def name(self) -> str:
        """``run.name``, or the folder's."""
        return str(cast("dict[str, Any]", self.config.get("run") or {}).get("name") or self.folder.name)

    @property
    def metrics(self) -> list[str]:
        """Every metric that some row has, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of the rows that have ``metric``."""
        return [(row.step, row.values[metric]) for row in self.rows if metric in row.values]


def read_record(folder: Path) -> RunRecord:
    """Read a run's folder. A torn last line, as a killed run leaves it, is noted and left out.

    Raises ``DataError`` naming the file, and the line where one cannot be read.
    """
    path = folder / METRICS
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give run.dir of a run")
    if not path.is_file():
        raise DataError(f"{folder} has no {METRICS}: give run.dir of a run that has trained at least one step")
    notes: list[str] = []
    rows = {row.step: row for row in _rows(path, notes)}
    if not rows:
        raise DataError(f"{path} has no complete line: the run has not finished a step yet")
    return RunRecord(folder, _config(folder / CONFIG, notes), tuple(rows[step] for step in sorted(rows)), tuple(notes))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _rows(path: Path, notes: list[str]) -> Iterator[LogRow]:
    content = InputFile(path).data()
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield parse_row(line)
        except ValueError as error:
            if number == len(lines) and not content.endswith(b"\n"):
                notes.append(f"{path}:{number}: the last line is torn and was left out")
                return
            raise DataError(
                f"{path}:{number} is no line of metrics ({reason(error)}): remove it, or copy the file again"
            ) from error


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"{path} is missing: the configuration is not known")
        return {}
    file = InputFile(path)
    tree = file.yaml()
    if not isinstance(tree, dict):
        raise file.refused("holds no configuration: it is written when a run starts")
    return cast("dict[str, Any]", tree)
