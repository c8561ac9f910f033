"""Rows of a jsonl or parquet file, with an optional slice: ``path@[a:b]``.

Files are read directly, not with the ``datasets`` library, for three reasons: errors name the file and line of a bad row,
a column may contain strings in one row and messages in the next, and nothing is cached outside the run's folder.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime_like.errors import DataError
from slime_like.util.reading import reason
from slime_like.util.row_count import SLICE, check_found, count_rows, open_parquet

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class RawRow:
    """Row before validation. ``fields`` is None if the row is not a JSON object; ``problem`` then says why."""

    index: int  # 0-based, in the whole file
    location: str  # "line 7" (jsonl) or "row 6" (parquet)
    fields: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DataFile:
    """Data file and the range of its rows that a run reads."""

    path: Path
    start: int
    stop: int  # exclusive, at most num_rows
    num_rows: int  # rows of the whole file

    @classmethod
    def open(cls, key: str, spec: str) -> DataFile:
        """Return the file and row range given by ``spec``, the value of config key ``key``: ``path`` or ``path@[a:b]``.

        Raises ``DataError`` if the file is missing, unreadable or empty, if its name has none of ``SUFFIXES``, or if the slice is
        malformed or empty.
        """
        match = SLICE.match(spec)
        if match is None and "@[" in spec:
            raise DataError(f"{key}={spec!r}: write a slice as path@[a:b]; omit a or b to start or end with the file")
        path = file_of(spec)
        if path.suffix not in SUFFIXES:
            raise DataError(
                f"{key}={spec!r}: {path.suffix or 'no suffix'} is not one of {', '.join(SUFFIXES)}; convert the file"
            )
        check_found(key, spec, path)
        if not path.is_file():
            raise DataError(f"{key}={spec!r}: there is no file {path}; {_nearest_file(path)}")
        num_rows = count_rows(path)
        bounds = slice(*(int(match[name]) if match and match[name] else None for name in ("start", "stop")))
        start, stop, _ = bounds.indices(num_rows)
        if start >= stop:
            cause = f"its slice of {num_rows} rows is empty" if num_rows else "the file is empty"
            raise DataError(f"{key}={spec!r} has no rows: {cause}; a dataset needs at least one")
        return cls(path, start, stop, num_rows)

    def rows(self) -> Iterator[RawRow]:
        """Yield the selected rows in file order. Lines of a jsonl file outside the slice are not parsed.

        Raises ``DataError`` if a parquet file cannot be read.
        """
        return self._jsonl() if self.path.suffix == ".jsonl" else self._parquet()

    def _jsonl(self) -> Iterator[RawRow]:
        index = -1
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                index += 1
                if index >= self.stop:
                    return
                if index >= self.start:
                    yield _parse(index, f"line {number}", line)

    def _parquet(self) -> Iterator[RawRow]:
        index = -1
        batches = open_parquet(self.path).iter_batches(batch_size=1024)
        while True:
            with self._name_row(index + 1):
                batch: Any = next(batches, None)
            if batch is None or index + 1 >= self.stop:
                return
            if index + batch.num_rows < self.start:
                index += batch.num_rows
                continue
            with self._name_row(index + 1):
                rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="lossy")
            for fields in rows:
                index += 1
                if self.start <= index < self.stop:
                    yield RawRow(index, f"row {index}", fields)

    @contextmanager
    def _name_row(self, index: int) -> Generator[None]:
        """Raise errors of reading a parquet file as a ``DataError`` that names the file and row ``index``."""
        try:
            yield
        # ArrowInvalid and UnicodeDecodeError are ValueErrors. OverflowError: Python cannot represent a date.
        except (ValueError, OSError, NotImplementedError, OverflowError) as error:
            raise DataError(
                f"{self.path}, row {index} or after: cannot be read ({reason(error)}); write the file again or choose another file"
            ) from error


def file_of(spec: str) -> Path:
    """Return the path of the file that ``spec`` (``path`` or ``path@[a:b]``) names."""
    match = SLICE.match(spec)
    return Path(match["path"] if match else spec).expanduser()


def _parse(index: int, location: str, line: bytes) -> RawRow:
    try:
        fields = json.loads(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        # The decoder numbers lines within this line, which would contradict the line number in the file.
        problem = f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        return RawRow(index, location, None, f"is not JSON ({problem}); each line must be one JSON object")
    if not isinstance(fields, dict):
        return RawRow(index, location, None, f"is a JSON {type(fields).__name__}; each line must be one JSON object")
    return RawRow(index, location, cast(dict[str, Any], fields))


def _nearest_file(path: Path) -> str:
    """Return a hint: a similar file name, other data files of the folder, or the missing folder."""
    if not path.parent.is_dir():
        existing_parent = next((p for p in path.parents if p.is_dir()), Path("."))
        return f"the folder {path.parent} does not exist (but {existing_parent} does)"
    try:
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES)
    except OSError as error:
        return f"the folder {path.parent} cannot be listed ({reason(error)})"
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.3)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    if not names:
        return f"the folder {path.parent} has no .jsonl or .parquet file"
    return f"the folder has {', '.join(names[:5])}"
