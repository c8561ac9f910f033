"""All ranks of a critic or a teacher, and one such rank as a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime_like.batch import Columns, PackedBatch, TrainBatch
from slime_like.cluster.workers.engine_actor import VISIBLE_DEVICES
from slime_like.cluster.workers.rank_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.config.schema.resolved import CriticSpec, TeacherSpec
from slime_like.data.shards import redeal, shards
from slime_like.metrics.types import Metric
from slime_like.util.imports import heavy_imports

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.role import MegatronRole


class RoleWorker(RankWorker):
    """Holds one rank of a critic or a teacher. Methods are called on all ranks at once."""

    def __init__(self, name: str, rank: int, world_size: int, stacks_dir: str, env: Mapping[str, str]) -> None:
        super().__init__(name, rank, world_size, stacks_dir, env)
        if VISIBLE_DEVICES in os.environ:  # Ray hides all GPUs from an actor that requests none
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
        self._role: MegatronRole | None = None

    def connect(self, spec: CriticSpec | TeacherSpec, master: tuple[str, int], local_rank: int) -> int:
        """Join the other ranks and build the model; return the data-parallel rank."""
        with heavy_imports():
            from slime_like.train.megatron.rank.role import MegatronRole

            meeting = self.meeting(master)
            self._role = MegatronRole(
                spec, rank=self._rank, world_size=self._world_size, master=meeting, local_rank=local_rank
            )
        return self._role.dp_rank

    @property
    def role(self) -> MegatronRole:
        """Return the connected rank."""
        assert self._role is not None, "connect comes first"
        return self._role

    def score(self, steps: Sequence[Sequence[PackedBatch]]) -> tuple[Columns | None, tuple[Metric, ...]]:
        """Return values or log-probabilities of this shard's rows."""
        return self.role.score(steps)

    def update(self, returns: Columns, num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Take the optimizer steps of a critic."""
        return self.role.update(returns, num_tokens)

    def begin_save(self, folder: str, iteration: int) -> None:
        """Begin to write this rank's part of a critic's checkpoint."""
        self.role.begin_save(Path(folder), iteration)

    def finish_save(self, wait: bool) -> bool:
        """Return True if the pending checkpoint is complete."""
        return self.role.finish_save(wait=wait)

    def load(self, folder: str, iteration: int) -> None:
        """Read this rank's part of a critic's checkpoint."""
        self.role.load(Path(folder), iteration)


class RoleGroup(RankGroup):
    """Ranks of a critic or teacher, which re-deal batches of the actor to their own data-parallel ranks."""

    def __init__(self, role: str, workers: Sequence[Any], spec: CriticSpec | TeacherSpec) -> None:
        super().__init__(role, workers, [0] * len(workers), spec.rank)
        self._dp = spec.rank.layout.dp

    def start_score(self, batch: TrainBatch) -> Refs:
        """Ship each shard once; pass the results to ``scored``."""
        return self.start_sharded("score", [ray.put(shard) for shard in shards(batch, self._dp)])

    def scored(
        self, answers: Mapping[str, Any], batch: TrainBatch, ranks: int
    ) -> tuple[list[Columns], tuple[Metric, ...]]:
        """Return columns for each of the actor's ``ranks`` data-parallel ranks, and metrics."""
        results = {name: answers[name] for name in self._workers}
        columns = self.by_shard({name: answer[0] for name, answer in results.items()})
        return redeal(columns, batch, ranks), tuple(m for answer in results.values() for m in answer[1])

    def start_update(self, returns: Sequence[Columns], batch: TrainBatch) -> Refs:
        """Start a critic's optimizer steps on ``returns``, which are sharded as the actor's."""
        tokens = [step.num_tokens for step in batch.steps]
        return self.start_sharded("update", redeal(returns, batch, self._dp), tokens)

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Snapshot the state of all ranks and begin to write it to ``folder/iter_<iteration>``."""
        self.on_all("begin_save", str(folder), iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the save is complete; with ``wait``, block until it is."""
        return all(self.on_all("finish_save", wait).values())

    def load(self, folder: Path, iteration: int) -> None:
        """Load an iteration of ``folder``."""
        self.on_all("load", str(folder), iteration)
