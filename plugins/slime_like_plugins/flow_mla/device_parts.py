"""Parts of layers in GPU memory, which other processes map by CUDA IPC, and copies of the parts on one stream per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_like.util import cuda_ipc


class StreamCopy:
    """Copy that runs on another stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait for the copy, even while a CUDA graph is captured."""
        torch.cuda.current_stream().wait_event(self._event)


class DeviceParts:
    """Parts in memory of torch's allocator.

    A part on another GPU is mapped into this GPU's address space, and read over the link between the GPUs.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        """Create a stream for each of ``num_slots`` slots on ``device``, which must have an index."""
        self._device = device
        self._streams = [torch.cuda.Stream(self._device) for _ in range(num_slots)]

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def address(self, part: Tensor) -> Mapping[str, Any]:
        return cuda_ipc.share(part)

    def open(self, address: Mapping[str, Any]) -> Tensor:
        """Map a part into this rank's GPU, whose streams and CUDA graphs can then copy from it.

        Raises ``ValueError`` if this GPU cannot read the memory of the part's GPU, and the errors of ``cuda_ipc.open_shared``.
        """
        if int(address["device"]) != self._device.index and not torch.cuda.can_device_access_peer(
            self._device, int(address["device"])
        ):
            raise ValueError(f"GPU {self._device.index} cannot read the memory of GPU {address['device']}")
        return cuda_ipc.open_shared(address, self._device.index)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def copy(self, slot: int, buffer: Tensor, parts: Sequence[Tensor]) -> StreamCopy:
        stream = self._streams[slot]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin = 0
            for part in parts:
                buffer[begin : begin + len(part)].copy_(part, non_blocking=True)
                begin += len(part)
            event = torch.cuda.Event()
            event.record(stream)
        return StreamCopy(event)
