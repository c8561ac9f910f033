"""Gathers by one-sided copies from the memory of the other ranks: CUDA IPC on a GPU, shared memory on a CPU.

Once each rank has mapped the others' parts, the ranks synchronise only before and after a weight update, so that no rank copies a
part while it is being written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like_plugins.flow_mla.device_parts import DeviceParts
from slime_like_plugins.flow_mla.gather import Pending
from slime_like_plugins.flow_mla.host_parts import HostParts

type Address = Mapping[str, Any]
"""Description of a part in memory, made of JSON types, by which another process opens it."""


class RankExchange(Protocol):
    """Messages between the ranks that hold the parts of a layer."""

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order. Collective."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        ...


class PartMemory(Protocol):
    """Memory for parts that other processes read."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uint8 memory for a part."""
        ...

    def address(self, part: Tensor) -> Address:
        """Return an address with which one other process can open a part."""
        ...

    def open(self, address: Address) -> Tensor:
        """Return the part at an address. Raises ``OSError``, ``RuntimeError`` or ``ValueError`` if it cannot be opened."""
        ...

    def settle(self) -> None:
        """Wait until earlier writes to parts, and earlier copies of parts, have finished."""
        ...

    def copy(self, slot: int, buffer: Tensor, parts: Sequence[Tensor]) -> Pending:
        """Start copying ``parts`` into ``buffer``, one after another, after earlier work on the slot."""
        ...


class GroupExchange:
    """Messages over a gloo process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, message: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._group.size())]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        largest = max(int(size) for size in sizes)
        texts = [torch.empty(largest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, torch.tensor([*message.ljust(largest)], dtype=torch.uint8), group=self._group)
        return [bytes(text[: int(size)].tolist()) for text, size in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        dist.barrier(group=self._group)


class PullGather:
    """Gathers that copy the parts from the memory of each rank into a slot."""

    def __init__(self, rank: int, num_ranks: int, exchange: RankExchange, memory: PartMemory) -> None:
        self._rank, self._num_ranks, self._exchange, self._memory = rank, num_ranks, exchange, memory
        self._parts: list[list[Tensor]] = []  # parts of each layer, in rank order

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._memory.allocate(num_bytes)

    def share(self, parts: Sequence[Tensor]) -> None:
        """Exchange the addresses of ``parts``, and open the parts of the other ranks. Collective.

        Raises ``SystemExit`` on all ranks if one of them cannot open another's parts, or if the sizes of their parts differ.
        """
        addresses = [  # indexed by the rank that opens them
            [] if rank == self._rank else [dict(self._memory.address(part)) for part in parts]
            for rank in range(self._num_ranks)
        ]
        message = {"machine": machine(), "sizes": [len(part) for part in parts], "addresses": addresses}
        messages: list[Any] = [json.loads(text) for text in self._exchange.gather(json.dumps(message).encode())]
        problem = ""
        try:
            parts_of_ranks = [
                parts if rank == self._rank else self._open(message, rank_message)
                for rank, rank_message in enumerate(messages)
            ]
            self._parts = [list(layer) for layer in zip(*parts_of_ranks, strict=True)]
        except (OSError, RuntimeError, ValueError) as error:
            problem = f"rank {self._rank} of {self._num_ranks} cannot read the weights of another rank: {error}"
        problems = [text.decode() for text in self._exchange.gather(problem.encode()) if text]
        if problems:
            raise SystemExit(
                f"slime_like plugin 'flow_mla': rollout.flow_mla.transport=p2p: {problems[0]}; set "
                "rollout.flow_mla.transport=collective (--flow-mla-transport collective)"
            )

    def meet(self) -> None:
        self._memory.settle()
        self._exchange.barrier()

    def start(self, slot: int, layer: int, buffer: Tensor) -> Pending:
        return self._memory.copy(slot, buffer, self._parts[layer])

    def _open(self, message: Mapping[str, Any], rank_message: Mapping[str, Any]) -> list[Tensor]:
        """Return the parts of the rank that sent ``rank_message``; ``message`` is this rank's.

        Raises ``ValueError`` if that rank is on another machine or its parts have other sizes, and the errors of
        ``PartMemory.open``.
        """
        if rank_message["machine"] != message["machine"]:
            raise ValueError("it runs on another machine or in another container")
        if rank_message["sizes"] != message["sizes"]:
            raise ValueError(f"its parts have {rank_message['sizes']} bytes instead of {message['sizes']}")
        opened_parts = [self._memory.open(address) for address in rank_message["addresses"][self._rank]]
        if [len(part) for part in opened_parts] != message["sizes"]:
            raise ValueError(f"it shares {[len(part) for part in opened_parts]} bytes instead of {message['sizes']}")
        return opened_parts


def machine() -> str:
    """Return a string that is equal in processes that can open each other's memory: boot id and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def part_memory(device: torch.device, num_slots: int) -> PartMemory:
    """Return the allocator of parts for ``device``: ``DeviceParts`` on a GPU, ``HostParts`` on a CPU."""
    return DeviceParts(device, num_slots) if device.type == "cuda" else HostParts(num_slots)
