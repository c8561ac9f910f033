"""Exchange of the ranks' parts of a layer, which runs while other layers compute: the interface, and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

DEADLINE = timedelta(minutes=10)
"""Longest wait for the other ranks. All ranks gather in the same forward, but one may have a longer prefill."""


class Pending(Protocol):
    """A gather in progress."""

    def wait(self) -> object:
        """Wait for the gather: the host on a CPU, the current stream on a GPU."""
        ...


class Gather(Protocol):
    """Exchange of the parts of layers between ranks."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return bytes for this rank's part of a layer."""
        ...

    def share(self, parts: Sequence[Tensor]) -> None:
        """Let the other ranks read this rank's part of each layer. All ranks call it once, after all parts were allocated."""
        ...

    def meet(self) -> None:
        """Wait until the other ranks have finished their earlier gathers and writes to their parts. All ranks call it."""
        ...

    def start(self, slot: int, layer: int, buffer: Tensor) -> Pending:
        """Start filling ``buffer`` of ``slot`` with the parts of ``layer``, in rank order, after earlier work on the buffer."""
        ...


class PendingAll:
    """Several collectives in progress."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each of them."""
        for work in self._works:
            work.wait()


class GroupGather:
    """Gathers over one process group per slot, in which all ranks take part.

    With NCCL they are all-gathers, with gloo a broadcast by each rank: gloo's all-gather receives into a second buffer of the
    whole layer. A group of NCCL has a stream, so gathers of the slots do not wait for each other or for the engine's collectives.
    Torch records an event before a gather and another one after it: the gather waits for kernels that read the slot, and ``wait``
    makes the current stream wait for the gather, also while a CUDA graph is captured. A group of gloo has its threads.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._parts: Sequence[Tensor] = ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def meet(self) -> None:
        """Wait for the work of all streams of this GPU; on a CPU, return at once.

        The other ranks need no wait: a gather itself waits for them, and they start it after their writes. But a gather waits for
        the current stream only, and SGLang's loaders write in threads, not on the scheduler's stream.
        """
        if self._parts and self._parts[0].is_cuda:
            torch.cuda.synchronize(self._parts[0].device)

    def start(self, slot: int, layer: int, buffer: Tensor) -> Pending:
        group, part = self._groups[slot], self._parts[layer]
        if buffer.is_cuda:
            work = dist.all_gather_single(buffer, part, group=group, async_op=True)
            assert work is not None
            return work
        parts = buffer.view(group.size(), -1)
        parts[group.rank()].copy_(part)
        return PendingAll([self._broadcast(group, tensor, rank) for rank, tensor in enumerate(parts)])

    def _broadcast(self, group: dist.ProcessGroup, tensor: Tensor, rank: int) -> Pending:
        """Start the broadcast of ``tensor`` by ``rank`` of the group."""
        work = dist.broadcast(tensor, group=group, group_src=rank, async_op=True)
        assert work is not None
        return work


def create_groups(
    members: Sequence[Sequence[int]], num_groups: int, backend: str, max_ctas: int | None = None
) -> list[dist.ProcessGroup]:
    """Return ``num_groups`` process groups with this rank. All ranks call it with the global ranks of all groups.

    ``max_ctas``: thread blocks, and so at most as many multiprocessors, that a collective of NCCL takes from the computation.
    """
    options: Any = None
    if max_ctas is not None and backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    own_groups: list[dist.ProcessGroup] = []
    for _ in range(num_groups):
        for ranks in members:
            group = dist.new_group(list(ranks), timeout=DEADLINE, backend=backend, pg_options=options)
            if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member
                own_groups.append(group)
    return own_groups
