"""Device memory of an export that every rank gathers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from slime_like.interfaces import TensorMeta
from slime_like.train.megatron.model_io.export import HFExport


class OneRank(HFExport):
    """Export of a rank without peers, which counts the gathered tensors in memory before it gathers another one."""

    def __init__(self) -> None:
        self._rank_info: Any = SimpleNamespace(layout=SimpleNamespace(pp=1), pp_rank=0, device=torch.device("cpu"))
        self.num_live: list[int] = []

    def manifest(self) -> tuple[TensorMeta, ...]:
        return ()

    def _stream(self, *, replicated: bool = False) -> Iterator[tuple[tuple[str, torch.Tensor] | None, int]]:
        assert replicated
        tensors: list[weakref.ref[torch.Tensor]] = []
        for index in range(5):
            self.num_live.append(sum(tensor() is not None for tensor in tensors))
            gathered = [torch.zeros(4)]
            tensors.append(weakref.ref(gathered[0]))
            yield (f"w{index}", gathered.pop()), 16


def test_a_bucket_is_dropped_before_the_next_one_is_gathered() -> None:
    """The first tensor of the next bucket is gathered before a bucket is known to be complete."""
    export = OneRank()
    names = []
    for bucket in export.replicated_buckets(16):
        names += [name for name, _ in bucket.tensors]
        del bucket
    assert names == [f"w{index}" for index in range(5)]
    assert export.num_live == [0, 1, 1, 1, 1]
