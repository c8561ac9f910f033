"""All-gather of a layer's parts into a slot, which runs while other layers compute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

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
    """Exchange of the parts of one layer."""

    def start(self, slot: int, buffer: Tensor, part: Tensor) -> Pending:
        """Start filling ``buffer`` of ``slot`` with the parts of all ranks, in rank order, after earlier work on the buffer."""
        ...


class GroupGather:
    """Gathers over one process group per slot.

    A group of NCCL has a stream, so gathers of the slots do not wait for each other or for the engine's collectives. Torch
    records an event before a gather and another one after it: the gather waits for kernels that read the slot, and ``wait``
    makes the current stream wait for the gather, also while a CUDA graph is captured. A group of gloo has its threads.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups

    def start(self, slot: int, buffer: Tensor, part: Tensor) -> Pending:
        work = dist.all_gather_single(buffer, part, group=self._groups[slot], async_op=True)
        assert work is not None
        return work


def create_groups(members: Sequence[Sequence[int]], num_slots: int, backend: str) -> list[dist.ProcessGroup]:
    """Return this rank's process group for each slot. All ranks call it with the global ranks of all groups."""
    slot_groups: list[dist.ProcessGroup] = []
    for _ in range(num_slots):
        for ranks in members:
            group = dist.new_group(list(ranks), timeout=DEADLINE, backend=backend)
            if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member
                slot_groups.append(group)
    return slot_groups
