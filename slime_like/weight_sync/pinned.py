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
    """Unlock memory that ``pin`` locked. No copy may be using it."""
    _cudart().cudaHostUnregister(memory.data_ptr())


def _clear_error() -> None:
    """Clear the CUDA runtime's last error, which torch would otherwise raise at its next kernel launch.

    Launching a kernel makes torch raise and clear the error. Remove when torch has a function for it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _cudart() -> Any:
    """Return torch's bindings of the CUDA runtime, which have no type annotations."""
    return torch.cuda.cudart()
