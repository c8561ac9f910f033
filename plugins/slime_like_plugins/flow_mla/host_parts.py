"""Parts of layers in host memory, which other processes map. One thread per slot copies the parts."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.util.sealed_memory import create_sealed, map_sealed
from slime_like_plugins.flow_mla.gather import DEADLINE


class ThreadCopy:
    """Copy that runs in a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait for the copy. Raises the copy's error, or ``TimeoutError`` after ``DEADLINE``."""
        seconds = DEADLINE.total_seconds()
        if not wait((self._future,), seconds).done:
            raise TimeoutError(
                f"FlowMLA: copying a layer's attention weights from the memory of other ranks did not finish in {seconds:.0f} s; set "
                "rollout.flow_mla.transport=collective if this occurs again"
            )
        self._future.result()


class HostParts:
    """Parts in sealed memory without a file name, which other processes map read-only."""

    def __init__(self, num_slots: int) -> None:
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"flow-mla-{slot}") for slot in range(num_slots)]
        self._fds: dict[int, int] = {}  # by address in memory
        weakref.finalize(self, _close, self._fds)

    def allocate(self, num_bytes: int) -> Tensor:
        fd, memory = create_sealed("slime_like-attention", num_bytes)
        part = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._fds[part.data_ptr()] = fd
        return part

    def address(self, part: Tensor) -> Mapping[str, Any]:
        return {"pid": os.getpid(), "fd": self._fds[part.data_ptr()]}

    def open(self, address: Mapping[str, Any]) -> Tensor:
        memory = map_sealed(int(address["pid"]), int(address["fd"]), mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors; nothing writes to this one
            return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))

    def settle(self) -> None:
        """Do nothing: writes on the host are synchronous, and all copies have already been waited for."""

    def copy(self, slot: int, buffer: Tensor, parts: Sequence[Tensor]) -> ThreadCopy:
        return ThreadCopy(self._threads[slot].submit(_copy, buffer, parts))


def _close(fds: Mapping[int, int]) -> None:
    """Close the descriptors; mappings stay valid."""
    for fd in fds.values():
        os.close(fd)


def _copy(buffer: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy ``parts`` one after another with NumPy, which releases the GIL and starts no threads."""
    begin = 0
    for part in parts:
        np.copyto(buffer[begin : begin + len(part)].numpy(), part.numpy())
        begin += len(part)
