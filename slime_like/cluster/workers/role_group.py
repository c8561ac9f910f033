"""All ranks of a critic or a teacher, and one such rank as a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from slime_like.batch import Columns, PackedBatch, TrainBatch, redistribute, shards
from slime_like.cluster.workers.calls import put
from slime_like.cluster.workers.engine_process import VISIBLE_DEVICES
from slime_like.cluster.workers.trainer_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.config.schema.resolved import CriticSpec, TeacherSpec
from slime_like.metrics.types import Metric
from slime_like.util.imports import heavy_imports

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.critic import RankCritic
    from slime_like.train.megatron.rank.residency import DeviceState
    from slime_like.train.megatron.rank.teacher import RankTeacher

type ShardScores = tuple[Columns | None, tuple[Metric, ...]]  # columns only from the rank that reports its shard


class RoleWorker(RankWorker):
    """Ray actor with one rank of a critic or a teacher. Methods are collectives: the driver calls them on all ranks."""

    def __init__(self, name: str, rank: int, world_size: int, stacks_dir: str, env: Mapping[str, str]) -> None:
        super().__init__(name, rank, world_size, stacks_dir, env)
        if VISIBLE_DEVICES in os.environ:  # Ray leaves all GPUs visible to an actor that requests none
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
        self._role: RankCritic | RankTeacher | None = None

    def connect(self, spec: CriticSpec | TeacherSpec, master: tuple[str, int]) -> int:
        """Join the other ranks and build the model; return the data-parallel rank.

        A collective over the role's ranks.
        """
        with heavy_imports():
            from slime_like.train.megatron.platform import groups

            address = self.rendezvous_address(master)
            rank_info = groups.join_and_make_groups(
                spec.rank, rank=self._rank, world_size=self._world_size, master=address
            )
            rank_info = replace(rank_info, separate_nodes=self.separate_nodes)
            if isinstance(spec, CriticSpec):
                from slime_like.train.megatron.rank.critic import RankCritic

                self._role = RankCritic(spec, rank_info)
            else:
                from slime_like.train.megatron.rank.teacher import RankTeacher

                self._role = RankTeacher(spec.rank, rank_info)
        return rank_info.dp_rank

    @property
    def device_state(self) -> DeviceState:
        """Return the storages of the connected rank, on the device or in host memory."""
        assert self._role is not None, "connect comes first"
        return self._role.device_state

    @property
    def critic(self) -> RankCritic:
        """Return the connected rank of a critic."""
        from slime_like.train.megatron.rank.critic import RankCritic

        assert isinstance(self._role, RankCritic), "a teacher is neither trained nor saved"
        return self._role

    def score(self, steps: Sequence[Sequence[PackedBatch]]) -> ShardScores:
        """Return the values (critic) or log-probabilities (teacher) of this shard's rows, and this rank's metrics.

        Values and log-probabilities are None except on the rank that reports its shard.
        """
        assert self._role is not None, "connect comes first"
        return self._role.score(steps)

    def update(self, returns: Columns, num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Take the optimizer steps of a critic."""
        return self.critic.update(returns, num_tokens)

    def begin_save(self, folder: str, iteration: int) -> None:
        """Begin to write this rank's part of a critic's checkpoint."""
        self.critic.begin_save(Path(folder), iteration)

    def finish_save(self, wait: bool) -> bool:
        """Return True if the pending checkpoint is complete; with ``wait``, block until it is."""
        return self.critic.finish_save(wait=wait)

    def load(self, folder: str, iteration: int) -> None:
        """Read this rank's part of a critic's checkpoint."""
        self.critic.load(Path(folder), iteration)


class RoleGroup(RankGroup[RoleWorker]):
    """Ranks of a critic or teacher, which split the batches of the actor among their own data-parallel ranks."""

    def __init__(self, role: str, workers: Sequence[ActorHandle[RoleWorker]], spec: CriticSpec | TeacherSpec) -> None:
        super().__init__(role, workers, spec.rank)
        self._spec = spec
        self._dp = spec.rank.layout.dp

    def start_connect(self, master: tuple[str, int]) -> Refs[int]:
        """Start joining the ranks and building the model on each."""
        return self.start(RoleWorker.connect, self._spec, master)

    def start_score(self, batch: TrainBatch) -> Refs[ShardScores]:
        """Ship each shard once and start scoring it; the caller passes the results to ``collect_scores``."""
        return self.start_sharded(RoleWorker.score, [put(shard) for shard in shards(batch, self._dp)])

    def collect_scores(
        self, answers: Mapping[str, ShardScores], batch: TrainBatch, ranks: int
    ) -> tuple[list[Columns], tuple[Metric, ...]]:
        """Return the scores, redistributed over the actor's ``ranks`` data-parallel ranks, and the metrics of this role's ranks.

        The scores are a critic's values or a teacher's log-probabilities. ``answers`` contains the results of ``start_score``
        by rank name, possibly with those of other roles.
        """
        results = {name: answers[name] for name in self._workers}
        columns = self.by_shard({name: answer[0] for name, answer in results.items()})
        return redistribute(columns, batch, ranks), tuple(m for answer in results.values() for m in answer[1])

    def start_update(self, returns: Sequence[Columns], batch: TrainBatch) -> Refs[tuple[Metric, ...]]:
        """Start a critic's optimizer steps on ``returns``, which are sharded like the actor's batches."""
        tokens = [step.num_tokens for step in batch.steps]
        return self.start_sharded(RoleWorker.update, redistribute(returns, batch, self._dp), tokens)

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Snapshot the state of all ranks and begin to write it to ``folder/iter_<iteration>``."""
        self.on_all(RoleWorker.begin_save, str(folder), iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the save is complete; with ``wait``, block until it is."""
        return all(self.on_all(RoleWorker.finish_save, wait).values())

    def load(self, folder: Path, iteration: int) -> None:
        """Load the critic's checkpoint ``folder/iter_<iteration>``."""
        self.on_all(RoleWorker.load, str(folder), iteration)
