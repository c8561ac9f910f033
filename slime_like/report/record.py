"""Configuration and metrics of a run, read from its folder."""

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
    """Configuration and metrics of a run."""

    folder: Path
    config: Mapping[str, Any]  # the resolved configuration as a tree; empty if the folder has none
    rows: tuple[LogRow, ...]  # by step
    notes: tuple[str, ...]  # one for each file or line that is missing or was skipped

    @property
    def name(self) -> str:
        """Return ``run.name``, or the name of the folder."""
        return str(self.setting("run.name") or self.folder.name)

    @property
    def metrics(self) -> list[str]:
        """Return all metric names in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the configuration.

        The result is None if there is no such key, or if its value is a non-empty mapping.
        """
        return flat(self.config).get(key)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) for each row that has ``metric``."""
        return [(row.step, row.values[metric]) for row in self.rows if metric in row.values]


def read_record(folder: Path) -> RunRecord:
    """Read a run's folder.

    An incomplete last line of the metrics, which a killed run can leave, is skipped with a note; a missing config.yaml also
    adds only a note. Raises ``DataError`` if ``folder`` is not that of a run that has finished a step, or if a file or line
    cannot be read. The error names the folder, file or line.
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
    """Flatten a tree of dicts to a dict from dotted key to value."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            values |= flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _rows(path: Path, notes: list[str]) -> Iterator[LogRow]:
    content = InputFile(path).data()
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield parse_row(line)
        except ValueError as error:
            if number == len(lines) and not content.endswith(b"\n"):
                notes.append(f"{path}:{number}: the last line is incomplete and was skipped")
                return
            raise DataError(
                f"{path}:{number} is not a line of metrics ({reason(error)}): remove it, or copy the file again"
            ) from error


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"{path} is missing: the report shows no configuration")
        return {}
    file = InputFile(path)
    tree = file.yaml()
    if not isinstance(tree, dict):
        raise file.refused("does not contain a mapping of config keys")
    return cast("dict[str, Any]", tree)
