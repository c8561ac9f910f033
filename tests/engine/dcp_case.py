"""A batch whose cached tokens are spread over the ranks of a DCP group, its exact attention, and ranks as threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_like.util.deadline import scale

DIM, WIDTH, PAGES = 8, 64, 200


class ThreadGroup:
    """A DCP group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self.world_size, self._barrier = size, threading.Barrier(size, timeout=30 * scale())
        self._inputs: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()
        self.device_group = self

    @property
    def rank_in_group(self) -> int:
        return int(self._local.rank)

    def enter(self, rank: int) -> None:
        """Make the calling thread ``rank``."""
        self._local.rank = rank

    def abort(self) -> None:
        """Raise ``BrokenBarrierError`` in all ranks that wait for the others."""
        self._barrier.abort()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._inputs[self.rank_in_group] = tensor.clone()
        self._barrier.wait()
        inputs = list(self._inputs)
        self._barrier.wait()
        return inputs

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_to_all_single(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        parts = [tensor.chunk(self.world_size)[self.rank_in_group] for tensor in self._exchange(input_tensor)]
        output_tensor.copy_(torch.cat(parts))


def by_threads[T](group: ThreadGroup, work: Callable[[int], T]) -> list[T]:
    """Return the results of ``work`` in rank order.

    Raises the error of a rank that failed, rather than that of a rank that waited for it.
    """

    def enter(rank: int) -> T:
        group.enter(rank)
        try:
            with torch.no_grad():
                return work(rank)
        except BaseException:
            group.abort()  # otherwise the other ranks wait for this one until their deadline
            raise

    with ThreadPoolExecutor(group.world_size) as executor:
        futures = [executor.submit(enter, rank) for rank in range(group.world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class Pool:
    """Keys and values of one rank; rows that the rank should not read are NaN."""

    def __init__(self, rows: int, dim: int = DIM) -> None:
        self.keys, self.values = torch.full((2, rows, 1, dim), math.nan)

    def set_kv_buffer(
        self, layer: Any, location: Any, k: Tensor, v: Tensor, *scales: float | None, dcp_kv_mask: Tensor | None = None
    ) -> None:
        mask = slice(None) if dcp_kv_mask is None else dcp_kv_mask
        self.keys[location.loc[mask]], self.values[location.loc[mask]] = k[mask], v[mask]

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.values

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


@dataclass
class ShardedCase:
    """Requests with new tokens after cached ones. Token tensors concatenate the tokens of all requests."""

    size: int
    decode: bool
    new: list[int]
    prefix: list[int]
    rows: Tensor  # row of the page table, per request
    table: Tensor  # int32 [9, WIDTH]: slots
    slots_L: Tensor  # slot of each token, cached and new
    fresh_L: Tensor  # True for new tokens
    keys: Tensor  # [L, D]
    values: Tensor
    q_THD: Tensor  # query heads of all ranks

    @property
    def total(self) -> list[int]:
        """Length of each sequence with its new tokens."""
        return [n + p for n, p in zip(self.new, self.prefix, strict=True)]

    def pools(self) -> list[Pool]:
        """Return the pool of each rank with its cached tokens."""
        pools = [Pool(PAGES + 1, self.keys.shape[-1]) for _ in range(self.size)]
        for rank, pool in enumerate(pools):
            tokens = ~self.fresh_L & (self.slots_L % self.size == rank)
            location = SimpleNamespace(loc=self.slots_L[tokens] // self.size)
            pool.set_kv_buffer(None, location, self.keys[tokens][:, None], self.values[tokens][:, None])
        return pools

    def exact(self) -> Tensor:
        """Return causal attention of all query heads in float64, [T, H, D]."""
        parts: list[Tensor] = []
        lens = self.total
        for q, k, v, p in zip(
            self.q_THD.split(self.new), self.keys.split(lens), self.values.split(lens), self.prefix, strict=True
        ):
            later_QL = torch.arange(len(k)) > p + torch.arange(len(q))[:, None]
            scores = torch.einsum("qhd,ld->hql", q.double(), k.double()) * q.shape[-1] ** -0.5
            weights = torch.softmax(scores.masked_fill(later_QL, -math.inf), -1)
            parts.append(torch.einsum("hql,ld->qhd", weights, v.double()))
        return torch.cat(parts)


def sharded_case(
    requests: Sequence[tuple[int, int]], size: int, heads: int, *, decode: bool, dim: int = DIM
) -> ShardedCase:
    """Return a case of ``requests`` (new, cached tokens) with ``heads`` query heads on each of ``size`` ranks."""
    generator = torch.Generator().manual_seed(len(requests))
    new = [1 if decode else n for n, _ in requests]
    prefix = [p + n - 1 if decode else p for n, p in requests]
    total = [n + p for n, p in zip(new, prefix, strict=True)]
    pages = torch.randperm(PAGES, generator=generator)[: sum(-(-n // size) for n in total)] + 1
    table = torch.full((9, WIDTH), 10**6, dtype=torch.int32)
    rows = torch.randperm(9, generator=generator)[: len(new)]
    slots: list[Tensor] = []
    for row, row_pages, length in zip(rows, pages.split([-(-n // size) for n in total]), total, strict=True):
        slots.append((row_pages[:, None] * size + torch.arange(size)).reshape(-1)[:length])
        table[row, :length] = slots[-1].int()
    keys, values = torch.randn(2, sum(total), dim, generator=generator)
    q_THD = torch.randn(sum(new), heads * size, dim, generator=generator)
    fresh_L = torch.cat([torch.arange(n) >= p for n, p in zip(total, prefix, strict=True)])
    return ShardedCase(size, decode, new, prefix, rows, table, torch.cat(slots), fresh_L, keys, values, q_THD)
