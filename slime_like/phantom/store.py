"""Rendezvous of one process that plays one rank of a larger world on a phantom GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

NCCL_ID_BYTES = 128
ALL_RANKS = 1 << 20  # more than the ranks of any world, so that a barrier over the store passes
_stores: list[dist.Store] = []  # torch keeps only the C++ part of a store alive, which calls these objects


class SoloStore(dist.Store):
    """Key-value store that behaves as if every absent rank had set its keys and joined every barrier.

    Only ``check``, ``delete_key`` and ``num_keys`` disregard the keys of absent ranks. The value of a key that this rank has not
    set is zeros, of the length of an NCCL id. No wait blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, or zeros of the size of an NCCL id if this rank has not set it."""
        return self._values.get(key, bytes(NCCL_ID_BYTES))

    def add(self, key: str, value: int) -> int:
        """Return a count above the number of ranks of any world, so that a barrier sees every rank. Store nothing."""
        return ALL_RANKS + value

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``key``, whatever its value, and return the new value."""
        self.set(key, desired_value)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether this rank has set all ``keys``.

        Keys of absent ranks count as not set, because torch checks only keys that signal a fault.
        """
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return immediately."""

    def delete_key(self, key: str) -> bool:
        """Remove ``key``. Return whether this rank had set it."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys that this rank has set."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: no wait blocks."""

    def clone(self) -> Any:
        """Return this store."""
        return self


def join_world(rank: int, world_size: int, backend: str = "nccl") -> None:
    """Initialize ``torch.distributed`` in this process, as ``rank`` of a world that has no other processes."""
    store = SoloStore()
    _stores.append(store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
