"""SHA-256 of a checkpoint's files, several files at a time. No torch.

SHA-256, as megatron-core's own manifests and ``sha256sum``: where the processor has instructions for it (all servers of the
last years) it is faster than BLAKE2. hashlib lets go of the interpreter's lock, so threads run side by side.
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
class Written:
    """Size and hash of a file at the time it was written."""

    size: Count
    sha256: str | None = None  # None: written by a version that recorded sizes only


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, in order. Ctrl-C ends it between two chunks. Raises ``OSError`` of the first failure."""
    stop = threading.Event()

    def digest(path: Path) -> str:
        found = hashlib.sha256(usedforsecurity=False)
        with path.open("rb", buffering=0) as file:
            while not stop.is_set() and (chunk := file.read(CHUNK)):
                found.update(chunk)
        return found.hexdigest()

    threads = max(1, min(len(paths), len(os.sched_getaffinity(0)), MAX_THREADS))
    with ThreadPoolExecutor(threads, thread_name_prefix="sha256") as pool:
        try:
            return list(pool.map(digest, paths))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def changed_files(folder: Path, written: Mapping[str, Written]) -> list[Path]:
    """Return the files of ``folder`` whose content is not what was ``written``, largest files hashed first."""
    names = sorted((name for name, file in written.items() if file.sha256), key=lambda name: -written[name].size)
    hashes = hash_files([folder / name for name in names])
    return sorted(folder / name for name, found in zip(names, hashes, strict=True) if found != written[name].sha256)


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()
