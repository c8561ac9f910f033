"""Folder of compiled kernels: Triton's cache, and TileLang's in a subfolder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.util.counted import counted

TILELANG = "tilelang"
LOADED = (".cubin", ".json")  # files of an entry that a run reads; the others are Triton's intermediate results


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One compiled variant of a Triton kernel."""

    name: str
    target: str  # GPU architecture, such as sm_90
    num_bytes: int


def cache_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that make Triton and TileLang use the cache in ``folder``."""
    return {"TRITON_CACHE_DIR": str(folder), "TILELANG_CACHE_DIR": str(folder / TILELANG)}


def read_cache(folder: Path) -> list[CacheEntry]:
    """Return the complete kernel variants in Triton's cache in ``folder``, sorted by target and name."""
    entries: list[CacheEntry] = []
    for cubin in folder.glob("*/*.cubin"):
        try:
            target = json.loads(cubin.with_suffix(".json").read_text(encoding="utf-8"))["target"]["arch"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an incomplete entry, which Triton compiles again
        entries.append(CacheEntry(cubin.stem, f"sm_{target}", cubin.stat().st_size))
    return sorted(entries, key=lambda entry: (entry.target, entry.name))


def cache_lines(entries: Sequence[CacheEntry]) -> list[str]:
    """Return the lines of a table: target, name, number of variants and size of each kernel, then the totals."""
    counts = Counter((entry.target, entry.name) for entry in entries)
    sizes: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        sizes[entry.target, entry.name] += entry.num_bytes
    lines = [
        f"{target:7} {name:70} {counts[target, name]:4} {sizes[target, name] / 1024:9.0f} KiB"
        for target, name in sorted(counts)
    ]
    total = sum(entry.num_bytes for entry in entries)
    return [*lines, f"{counted(len(counts), 'kernel')} in {counted(len(entries), 'variant')}, {total / 2**20:.1f} MiB"]


def relocate(folder: Path) -> int:
    """Make a cache that was copied to ``folder`` usable. Return the number of its usable kernel variants.

    Triton lists the absolute path of each file of a variant, and ignores the variant unless all of its files exist. This
    function rewrites the lists with the current paths of the files that a run reads. It is safe while a run reads the cache.
    Raises ``OSError`` if a list cannot be written. Remove this function once Triton's lists contain relative paths.
    """
    num_relocated = 0
    for group in folder.glob("*/__grp__*.json"):
        try:
            names: Any = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            paths = {str(name): group.parent / str(name) for name in names if str(name).endswith(LOADED)}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if {Path(name).suffix for name, path in paths.items() if path.is_file()} != set(LOADED):
            continue
        _replace(group, json.dumps({"child_paths": {name: str(path) for name, path in paths.items()}}))
        num_relocated += 1
    return num_relocated


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, because another process may be reading it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
