"""Rank function of test_export_memory: an export of one rank that counts the gathered tensors in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from slime_like.interfaces import TensorMeta
from slime_like.train.megatron.model_io.export import HFExport
from tests.train.jobs import Shared
from tests.train.ranks import RankWorld


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


def count_live(world: RankWorld, shared: Shared) -> tuple[list[str], list[int]]:
    """Return the names of the exported tensors, and the number of tensors in memory before each was gathered."""
    del world, shared
    export, names = OneRank(), list[str]()
    for bucket in export.replicated_buckets(16):
        names += [name for name, _ in bucket.tensors]
        del bucket
    return names, export.num_live
