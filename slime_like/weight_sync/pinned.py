"""Page-locked host memory: a GPU copies to it directly, and the host does not wait for each copy."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError


def pin(memory: Tensor) -> None:
    """Page-lock a tensor's host memory, shared memory included. Call ``unpin`` before it is unmapped.

    Raises ``WeightSyncError`` if CUDA refuses.
    """
    error = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0))
    if error != 0:
        _clear_error()
        raise WeightSyncError(
            f"CUDA cannot page-lock {memory.numel() * memory.element_size() / 2**20:.0f} MiB of host memory for a bucket of weights "
            f"(cudaHostRegister returned {error}): raise the limit of locked memory (ulimit -l, docker run --ulimit memlock=-1), or "
            "lower weights.bucket_mb"
        )


def unpin(memory: Tensor) -> None:
    """Unlock memory of ``pin``, which no copy may be using."""
    _cudart().cudaHostUnregister(memory.data_ptr())


def _clear_error() -> None:
    """Launch a kernel: after it, torch raises and clears the runtime's last error, which another kernel would raise otherwise.

    Remove when torch has a function for it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _cudart() -> Any:
    """Return CUDA's runtime, for which torch has no types."""
    return torch.cuda.cudart()
