"""One rank's range of the packed stream (``model.stream``), with its index arrays on the device.

A range is built once per micro-batch for all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from slime_like.train.megatron.model.stream import StreamPart, stream_part
from slime_like_plugins.qwen_gdn.backend import GDNBackend, RangeRule


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of N sequences, or of parts of sequences, in a call's rows: I32 [N + 1], on the host and on the data's device."""

    host: Tensor
    device: Tensor

    @classmethod
    def of(cls, edges: Sequence[int], device: torch.device) -> Bounds:
        """Return ``edges`` as a tensor on the host and its copy on ``device``.

        All layers share the result (``range_of``), because kernels cache derived values by the identity of the device tensor.
        """
        host = torch.tensor(edges, dtype=torch.int32)
        return cls(host, host.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Range:
    """A rank's ``StreamPart`` with its index arrays and bounds on the device."""

    part: StreamPart
    rank: int
    group: Any  # the context parallel group
    order: Tensor  # [L]
    inverse: Tensor  # [L]
    pieces: Bounds
    all_but_last: Bounds
    last_piece: Bounds
    first_piece: Bounds
    rule: RangeRule | None  # the backend's own rule; None if it has none, or if no border between ranks cuts a sequence

    def to_stream(self, rows: Tensor) -> Tensor:
        """Send the ``rows`` [L, ...] of the tokens that this rank has in attention; return those of its range's tokens, in order.

        In attention, a rank has two chunks of every sequence (``model.layout.zigzag``). Collective over the context parallel
        group.
        """
        return all_to_all(self.group, rows, list(self.part.receive), list(self.part.send)).index_select(0, self.order)

    def to_rows(self, stream: Tensor) -> Tensor:
        """Reverse ``to_stream``. Collective."""
        rows = stream.index_select(0, self.inverse)
        return all_to_all(self.group, rows, list(self.part.send), list(self.part.receive))

    def gather(self, local: Tensor) -> Tensor:
        """Return ``local`` [...] of all ranks, stacked by rank [cp, ...].

        Backward sums the gradients of all ranks. Collective in both passes.
        """
        return gather_from_sequence_parallel_region(local[None], group=self.group)


@functools.lru_cache(maxsize=16)
def range_of(stream: tuple[int, ...], group: Any, device: torch.device, backend: GDNBackend) -> Range:
    """Return this rank's range of the stream with the bounds ``stream``; the same object for all layers of a micro-batch."""
    part = stream_part(np.array(stream, np.int32), cp=group.size(), cp_rank=group.rank())
    order = torch.from_numpy(part.order).to(device, non_blocking=True)
    edges = part.cu_seqlens.tolist()
    rule = None
    if part.is_cut:
        bounds = Bounds.of(stream, device)
        rule = backend.range_rule(bounds.device, bounds.host, group)
    return Range(
        part,
        group.rank(),
        group,
        order,
        inverse=torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device)),
        pieces=Bounds.of(edges, device),
        all_but_last=Bounds.of(edges[:-1], device),
        last_piece=Bounds.of([0, edges[-1] - edges[-2]], device),
        first_piece=Bounds.of(edges[:2], device),
        rule=rule,
    )
