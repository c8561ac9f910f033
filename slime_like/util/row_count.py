"""Rows of a dataset, counted without reading them: the name of a file with an optional slice, ``path@[a:b]``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.util.reading import InputFile, reason

SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]$")


def count_rows(path: Path) -> int:
    """Lines of a jsonl that are not blank, or rows of a parquet file. Raises ``DataError`` where it is not readable."""
    if path.suffix == ".jsonl":
        InputFile(path).check_regular()
        try:
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({reason(error)}): copy it again, or change its permissions"
            ) from error
    return int(open_parquet(path).metadata.num_rows)


def rows_of(spec: str) -> range:
    """The rows of a file that ``path`` or ``path@[a:b]`` names."""
    found = SLICE.match(spec)
    num_rows = count_rows(Path(found["path"] if found else spec).expanduser())
    bounds = (int(found[name]) if found and found[name] else None for name in ("start", "stop"))
    return range(num_rows)[slice(*bounds)]


def open_parquet(path: Path) -> Any:
    """pyarrow's ParquetFile: untyped, and imported only where a file asks for it."""
    module: Any = importlib.import_module("pyarrow.parquet")
    try:
        return module.ParquetFile(path)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{path} is not a readable parquet file ({reason(error)}); write it again or name another"
        ) from error
