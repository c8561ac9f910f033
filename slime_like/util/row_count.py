"""Number of rows of a dataset, given as a file with an optional slice: ``path@[a:b]``."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.util.reading import InputFile, reason

SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]$")


def check_found(key: str, spec: str, path: Path) -> None:
    """Raise ``DataError`` if the system does not tell whether ``path``, the file of ``spec`` in config key ``key``, exists.

    An example is a path in a folder without search permission.
    """
    try:
        path.is_file()
    except OSError as error:
        raise DataError(
            f"{key}={spec!r}: {path} cannot be read ({reason(error)}): correct the path, or change the permissions of its folders"
        ) from error


def count_rows(path: Path) -> int:
    """Return the number of non-blank lines of a jsonl file or of rows of a parquet file.

    Raises ``DataError`` if the file cannot be read.
    """
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


def selected_rows(spec: str) -> range:
    """Return the range of row indices that ``spec`` (``path`` or ``path@[a:b]``) selects.

    Raises ``DataError`` as ``count_rows`` does.
    """
    match = SLICE.match(spec)
    num_rows = count_rows(Path(match["path"] if match else spec).expanduser())
    bounds = (int(match[name]) if match and match[name] else None for name in ("start", "stop"))
    return range(num_rows)[slice(*bounds)]


def open_parquet(path: Path) -> Any:
    """Return an open pyarrow ParquetFile. Raises ``DataError`` if the file cannot be read.

    The result is untyped, because pyarrow is imported only if a parquet file is used.
    """
    module: Any = importlib.import_module("pyarrow.parquet")
    try:
        return module.ParquetFile(path)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{path} is not a readable parquet file ({reason(error)}); write the file again or choose another file"
        ) from error
