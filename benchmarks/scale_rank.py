"""Trainer rank without a model: an actor that answers the driver's calls of a step and of a push.

It has a module of its own, so that the ranks' processes import little.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from slime_like.batch import PackedBatch
from slime_like.cluster.workers.trainer_worker import TrainerWorker
from slime_like.config.schema.resolved import RankSpec, TransportSpec
from slime_like.interfaces import EngineAddress, TensorMeta
from slime_like.metrics.types import Max, Metric, Sum
from slime_like.types import F32

OPS = 20  # ops x groups that a rank counts, with three metrics each (``distributed/guard/counters.py``)
TENSORS = 400
MANIFEST = tuple(
    TensorMeta(f"model.layers.{index // 10}.part_{index % 10}.weight", (4096, 4096), "bfloat16")
    for index in range(TENSORS)
)


class SimulatedRank(TrainerWorker):
    """Rank of ``TrainerGroup`` that receives its batches and returns results of a real rank's size, without computing them."""

    def connect(self, spec: RankSpec, master: tuple[str, int]) -> int:
        """Return this rank's data-parallel rank; the ranks of a tensor-parallel group are adjacent."""
        return self._rank // spec.layout.tp

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def keep_on_device(self, parts: Sequence[str]) -> None:
        """Move nothing: the rank has no state."""

    def train_rollout(self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Return the number of received tokens and the counters of ``OPS`` collectives."""
        tokens = sum(len(batch.token_ids) for step in steps for batch in step)
        counters: list[Metric] = [Sum("tokens", tokens)]
        for op in range(OPS):
            name = f"comm/group_{op}/all_reduce"
            counters += [Sum(f"{name}/calls", 1), Sum(f"{name}/bytes", 4096), Max(f"{name}/time", 0.001 * self._rank)]
        return tuple(counters)

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32 | None:
        """Return zeros on rank 0, the reporter, and None on other ranks."""
        return np.zeros(len(batch.token_ids), dtype=np.float32) if self._rank == 0 else None

    def manifest(self) -> tuple[TensorMeta, ...]:
        """Return the metadata of ``TENSORS`` tensors on rank 0, the sender, and nothing on other ranks."""
        return MANIFEST if self._rank == 0 else ()

    def send_weights(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> list[TensorMeta]:
        """Return ``manifest`` without sending any bytes."""
        return list(self.manifest())
