"""Check that a block leaves a folder untouched."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return {path relative to ``folder``: bytes of the file}, None for a folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


@contextmanager
def unchanged(folder: Path) -> Generator[None]:
    """Assert that the block changes neither the names and bytes in ``folder`` nor its existence."""
    before, existed = contents(folder), folder.exists()
    yield
    after = contents(folder)
    assert folder.exists() == existed
    assert sorted(after) == sorted(before)
    assert [name for name in before if after[name] != before[name]] == []
