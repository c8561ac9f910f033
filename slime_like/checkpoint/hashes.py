"""SHA-256 of a checkpoint's files, several files at a time. Torch-free.

megatron-core's manifests and ``sha256sum`` also use SHA-256. It is faster than BLAKE2 on processors with SHA
instructions, such as those of current servers. hashlib releases the GIL, so threads run in parallel.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slime_like.util.reading import Count

CHUNK = 1 << 22
MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and hash of a file, as checkpoint.json records them."""

    size: Count
    sha256: str | None = None  # None if an older version recorded only sizes


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, in order. Raises the first ``OSError``. Ctrl-C takes effect after the current chunks."""
    stop = threading.Event()

    def digest(path: Path) -> str:
        sha256 = hashlib.sha256(usedforsecurity=False)
        with path.open("rb", buffering=0) as file:
            while not stop.is_set() and (chunk := file.read(CHUNK)):
                sha256.update(chunk)
        return sha256.hexdigest()

    threads = max(1, min(len(paths), len(os.sched_getaffinity(0)), MAX_THREADS))
    with ThreadPoolExecutor(threads, thread_name_prefix="sha256") as pool:
        try:
            return list(pool.map(digest, paths))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def changed_files(folder: Path, records: Mapping[str, FileRecord]) -> list[Path]:
    """Return the sorted paths of files in ``folder`` whose SHA-256 differs from ``records``.

    Files without a recorded SHA-256 are skipped.
    """
    names = sorted((name for name, file in records.items() if file.sha256), key=lambda name: -records[name].size)
    hashes = hash_files([folder / name for name in names])
    return sorted(folder / name for name, digest in zip(names, hashes, strict=True) if digest != records[name].sha256)


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()
