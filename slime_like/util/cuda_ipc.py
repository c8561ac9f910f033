"""Sharing of device memory with another process by CUDA IPC, through an address made of JSON types.

torch frees shared memory only after every address of it has been opened and closed once, or passed to ``forget``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = ("device", "handle", "num_bytes", "offset", "counter", "counter_offset", "event", "waits")
"""Names of the values that torch's ``_share_cuda_`` returns, in order."""
BYTES = ("handle", "counter", "event")
SHARED_MEMORY = Path("/dev/shm")  # contains torch's files of reference counts
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
UNSHAREABLE = {
    "expandable_segments:true": "memory in expandable segments",  # torch passes file descriptors, which containers often forbid
    "backend:cudamallocasync": "memory of cudaMallocAsync",
}
"""Map from a setting of torch's allocator, in lower case, to the kind of memory that it selects. None has a CUDA IPC handle."""


def share(memory: Tensor) -> dict[str, Any]:
    """Return an address of a tensor's whole storage. The receiver's stream waits for work queued on the current stream."""
    storage: Any = memory.untyped_storage()
    address: Any = dict(zip(FIELDS, storage._share_cuda_(), strict=True))
    return address | {name: address[name].hex() for name in BYTES}


def open_shared(address: Mapping[str, Any], device: int) -> Tensor:
    """Return the bytes at an address as a uint8 tensor on ``device``.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` on a malformed address, ``RuntimeError`` if CUDA cannot open it, or
    if this process does not share the sender's /dev/shm.
    """
    import torch

    fields = dict(address) | {name: bytes.fromhex(address[name]) for name in BYTES}
    fields["device"] = device
    counter = SHARED_MEMORY / fields["counter"].decode().lstrip("/")
    if not counter.exists():  # torch would ignore its absence and never free the sender's memory
        raise RuntimeError(f"{counter}, torch's count of its users, is not in this process's {SHARED_MEMORY}")
    storage_type: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = storage_type._new_shared_cuda(*(fields[name] for name in FIELDS))
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)


def forget(address: Mapping[str, Any]) -> None:
    """Count an address as closed, on behalf of a receiver that has ended."""
    import torch

    storage_type: Any = torch.UntypedStorage
    counter, offset = bytes.fromhex(address["counter"]), address["counter_offset"]
    storage_type._release_ipc_counter(counter, offset, device=address["device"])


def unshareable_memory_message(setting: str) -> str:
    """Return the error message for a run that needs CUDA IPC but has ``setting``, a result of ``unshareable_memory``."""
    kind = next(kind for option, kind in UNSHAREABLE.items() if option in _normalised(setting))
    return f"weights.transport=ipc with {setting}: {kind} has no CUDA IPC handle; remove {setting}, or set weights.transport=tensor"


def unshareable_memory(environment: Mapping[str, str]) -> str:
    """Return the setting ``VARIABLE=value`` that makes torch allocate memory without a CUDA IPC handle; empty if not set."""
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if any(option in _normalised(value) for option in UNSHAREABLE):
            return f"{variable}={value}"
    return ""


def _normalised(value: str) -> str:
    return value.replace(" ", "").lower()
