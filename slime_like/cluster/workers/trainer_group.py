"""All trainer ranks as one Trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slime_like.batch import Columns, PackedBatch, TrainBatch
from slime_like.cluster.workers.rank_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import EngineAddress
from slime_like.cluster.workers.wait import wait_all
from slime_like.config.schema.resolved import ActorSpec, TransportSpec
from slime_like.data.shards import shards
from slime_like.errors import WorkerError
from slime_like.interfaces import TensorMeta
from slime_like.types import F32, StepStats


class TrainerGroup(RankGroup):
    """Calls all actor ranks concurrently and returns the result of the reporter."""

    def __init__(self, workers: Sequence[Any], spec: ActorSpec, local_ranks: Sequence[int]) -> None:
        super().__init__("trainer", workers, local_ranks, spec)
        self._spec = spec
        self.version = 0

    def step(self, batch: TrainBatch) -> StepStats:
        """Ship each dp shard once, take every optimizer step, return the reporter's metrics."""
        tokens = [step.num_tokens for step in batch.steps]
        results = wait_all(self.start_sharded("step", self._ship(batch), tokens), self.deadline("step"))
        self.version += 1
        return StepStats(self.version, tuple(metric for metrics in results.values() for metric in metrics))

    def _ship(self, batch: TrainBatch) -> list[Any]:
        return [ray.put(shard) for shard in shards(batch, self._spec.layout.dp)]

    def start_open(self, batch: TrainBatch) -> Refs:
        """Start the first part of ``step`` with other roles: ship each shard once and score it."""
        return self.start_sharded("open_rollout", self._ship(batch))

    def start_estimate(self, columns: Sequence[Mapping[str, Columns]]) -> Refs:
        """Start the second part: ``columns`` of other roles per data-parallel rank; the results are a critic's returns."""
        return self.start_sharded("estimate", [ray.put(column) for column in columns])

    def start_update(self, batch: TrainBatch, *, frozen: bool) -> Refs:
        """Start the last part: the optimizer steps, none if ``frozen``."""
        return self.start("update", [step.num_tokens for step in batch.steps], frozen)

    def score(self, rows: PackedBatch, exact: str | None = None) -> F32:
        """Return [T] log-probabilities at the sampling temperature; layers of kind ``exact`` are computed in float64."""
        shared = ray.put(rows)
        scored = [x for x in self.on_all("score", shared, exact).values() if x is not None]
        if len(scored) != 1:
            raise WorkerError(f"{len(scored)} trainer ranks reported log-probabilities, one should")
        return np.asarray(scored[0], dtype=np.float32)

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return sample id -> advantages [L] that the ranks computed in the last trained rollout."""
        answers = self.on_all("token_advantages", list(sample_ids)).values()
        return {sample_id: column for columns in answers for sample_id, column in columns.items()}

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers of the model that ``score`` can compute in float64."""
        return tuple(sorted({kind for kinds in self.on_all("layer_kinds").values() for kind in kinds}))

    def kernels(self) -> tuple[str, ...]:
        """Return the kernel descriptions of the layers of all ranks."""
        return tuple(sorted({description for rank in self.on_all("kernels").values() for description in rank}))

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Snapshot the state of all ranks and begin to write it to ``folder/iter_<iteration>``."""
        self.on_all("begin_save", str(folder), iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the save is complete; with ``wait``, block until it is."""
        return all(self.on_all("finish_save", wait).values())

    def load(self, folder: Path, iteration: int) -> None:
        """Load ``folder/iter_<iteration>``."""
        versions = set(self.on_all("load", str(folder), iteration).values())
        if len(versions) != 1:
            raise WorkerError(
                f"trainer ranks read different versions from {folder}: {sorted(versions)}; is the folder shared by all nodes?"
            )
        self.version = int(versions.pop())

    def export_hf(self, folder: Path) -> None:
        """Write the weights in HF format."""
        self.on_all("export_hf", str(folder))

    def manifests(self) -> list[tuple[TensorMeta, ...]]:
        """Return the tensors that each sender will send in a push."""
        return [manifest for manifest in self.on_all("manifest").values() if manifest]

    def push(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> list[TensorMeta]:
        """Send all weights and return the metadata of the sent tensors."""
        sent = self.on_all("push", list(engines), transport, seconds=transport.deadline_s)
        return [meta for metas in sent.values() for meta in metas]
