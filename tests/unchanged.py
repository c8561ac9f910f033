"""A refusal leaves what is on the disk as it was."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Name below ``folder`` -> bytes of the file; None of a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@contextmanager
def unchanged(folder: Path) -> Generator[None]:
    """Assert that ``folder`` holds the same names and bytes before and after the block, and that it still exists or not."""
    before, existed = contents(folder), folder.exists()
    yield
    after = contents(folder)
    assert folder.exists() == existed
    assert sorted(after) == sorted(before)
    assert [name for name in before if after[name] != before[name]] == []
