"""Gathers of a layer's parts from all ranks while other layers compute: the interface, and gathers by collectives."""

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
        """Wait for the gather: on a CPU the host waits, on a GPU the current stream."""
        ...


class Gather(Protocol):
    """Gathers of layers whose parts are spread over the ranks."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return uint8 memory for this rank's part of a layer."""
        ...

    def share(self, parts: Sequence[Tensor]) -> None:
        """Make this rank's part of each layer readable by the other ranks.

        Collective: all ranks call it once, after allocating all parts.
        """
        ...

    def meet(self) -> None:
        """Wait until all ranks have finished earlier gathers and earlier writes to their parts. Collective.

        If gathers already wait for the other ranks, an implementation may wait for this rank's work only.
        """
        ...

    def start(self, slot: int, layer: int, buffer: Tensor) -> Pending:
        """Start filling ``buffer`` of ``slot`` with the parts of ``layer`` in rank order, after earlier work on the buffer.

        May be a collective: all ranks start the same gathers in the same order.
        """
        ...


class PendingAll:
    """Several collectives in progress."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each collective."""
        for work in self._works:
            work.wait()


class GroupGather:
    """Gathers by collectives, over one process group per slot (a buffer for one gathered layer).

    With NCCL, a gather is an all-gather; with gloo, a broadcast by each rank, because gloo's all-gather receives into a
    second buffer of the whole layer. Each NCCL group has its own stream, and each gloo group its own threads, so
    gathers into different slots do not wait for each other or for the engine's collectives. With NCCL, torch records an
    event before and after each gather: the gather waits for kernels that read the slot, and ``wait`` makes the current
    stream wait for the gather, even while a CUDA graph is captured.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._parts: Sequence[Tensor] = ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def meet(self) -> None:
        """Wait for the work of all streams of this GPU; on a CPU, return immediately.

        A gather itself waits only for the current stream of this GPU, but SGLang's loaders write in threads, on other streams.
        Other ranks need no wait here: a gather needs the part of every rank, and each rank joins it after its own writes.
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
        """Start the broadcast of ``tensor`` by ``rank`` of the group. Collective in ``group``."""
        work = dist.broadcast(tensor, group=group, group_src=rank, async_op=True)
        assert work is not None
        return work


def create_groups(
    members: Sequence[Sequence[int]], num_groups: int, backend: str, max_ctas: int | None = None
) -> list[dist.ProcessGroup]:
    """Create ``num_groups`` process groups for each list of ranks in ``members``, and return those that contain this rank.

    ``members`` contains disjoint lists of global ranks. Collective: all ranks call it with the same lists. ``max_ctas`` limits
    the thread blocks of an NCCL collective, and so the multiprocessors that it takes from the computation.
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
