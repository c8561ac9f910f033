"""Memory that an engine and a worker of one machine share: a sealed memfd without a file name, divided into slots.

A request and, after it, its reply use the same slot; a frame in the socket announces each of them. Only processes of the same
user, or of root, can open the memory, through ``/proc/<pid>/fd``.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

from slime_like.util.sealed_memory import create_sealed, map_sealed
from slime_like_plugins.remote_experts.frames import FrameError

NONCE_BYTES = 16
FIRST_SLOT = 64  # bytes before the slots: the nonce
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """Description of a region, sent as JSON."""

    pid: int
    fd: int
    num_slots: int
    slot_bytes: int


class Region:
    """Slots in shared memory."""

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int, fd: int = -1) -> None:
        self._view, self.num_slots, self.slot_bytes, self._fd = memoryview(memory), num_slots, slot_bytes, fd

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Region:
        """Allocate a region of fixed size. Pages take up memory only once they are written."""
        slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        fd, memory = create_sealed("slime_like-experts", region_bytes(num_slots, slot_bytes))
        memory[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        return cls(memory, num_slots, slot_bytes, fd)

    @classmethod
    def attach(cls, offer: RegionOffer) -> Region:
        """Map the region of another process.

        Raises ``FrameError`` if it cannot be opened, is not sealed memory of this user, or is too small.
        """
        required_bytes = region_bytes(offer.num_slots, offer.slot_bytes)
        try:
            memory = map_sealed(offer.pid, offer.fd, mmap.ACCESS_WRITE)
        except OSError as error:
            raise FrameError(
                f"memory {offer.fd} of process {offer.pid} cannot be opened ({error.strerror}): the peer is not on this machine"
            ) from error
        except ValueError as error:
            raise FrameError(str(error)) from error
        if min(offer.num_slots, offer.slot_bytes) < 1 or len(memory) < required_bytes:
            raise FrameError(
                f"the shared region is too small: {len(memory)} bytes for {offer.num_slots} slots of {offer.slot_bytes} bytes"
            )
        return cls(memory, offer.num_slots, offer.slot_bytes)

    def offer(self) -> RegionOffer:
        """Return the description for ``attach``."""
        return RegionOffer(os.getpid(), self._fd, self.num_slots, self.slot_bytes)

    @property
    def nonce(self) -> str:
        """Random number at the start of the memory, by which a worker proves that it has mapped this memory."""
        return self._view[:NONCE_BYTES].hex()

    def slot(self, index: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of a slot. Raises ``FrameError`` if there is no such slot or it is smaller."""
        if not 0 <= index < self.num_slots or not 0 <= size <= self.slot_bytes:
            raise FrameError(
                f"{size} bytes in slot {index} of a shared region with {self.num_slots} slots of {self.slot_bytes} bytes"
            )
        start = FIRST_SLOT + index * self.slot_bytes
        return self._view[start : start + size]

    def close(self) -> None:
        """Close the file descriptor; the mapping lasts as long as views of it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def region_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the size of a region in bytes."""
    return FIRST_SLOT + num_slots * slot_bytes
