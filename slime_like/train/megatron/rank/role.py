"""One rank of a critic or a teacher. As with ``actor``, importing this file is cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.resolved import CriticSpec, TeacherSpec
from slime_like.distributed.wrapper import install
from slime_like.metrics.types import Metric
from slime_like.train.megatron.platform import groups
from slime_like.train.megatron.weights.checkpointed import CheckpointedRank
from slime_like.util.ports import Meeting

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.critic import RankCritic
    from slime_like.train.megatron.rank.teacher import RankTeacher
    from slime_like.train.megatron.weights.checkpoint import Parts


class MegatronRole(CheckpointedRank):
    """A rank of a critic or teacher. Every rank calls the same methods in the same order; all are collective."""

    def __init__(
        self,
        spec: CriticSpec | TeacherSpec,
        *,
        rank: int,
        world_size: int,
        master: Meeting,
        local_rank: int = 0,
    ) -> None:
        """Join the world and load the checkpoint. Raises ``ConfigError`` or ``CheckpointError`` like ``MegatronActor``."""
        rank_info = groups.enter(spec.rank, rank=rank, world_size=world_size, master=master, local_rank=local_rank)
        self.dp_rank = rank_info.dp_rank
        self.is_reporter = rank_info.is_reporter
        super().__init__(spec.rank.deadline_s)
        self.model: RankCritic | RankTeacher
        if isinstance(spec, CriticSpec):
            from slime_like.train.megatron.rank.critic import RankCritic

            self.model = RankCritic(spec, rank_info)
        else:
            from slime_like.train.megatron.rank.teacher import RankTeacher

            self.model = RankTeacher(spec.rank, rank_info)

    @property
    def critic(self) -> RankCritic:
        """The critic of this rank. Asserts that the role is one."""
        from slime_like.train.megatron.rank.critic import RankCritic

        assert isinstance(self.model, RankCritic), "a teacher is neither trained nor saved"
        return self.model

    def score(self, steps: Sequence[Sequence[PackedBatch]]) -> tuple[Columns | None, tuple[Metric, ...]]:
        """Return values or log-probabilities of this shard's rows, on the rank that speaks for it."""
        with install.phase("score"):
            columns, metrics = self.model.score(steps)
        return columns, (*metrics, *install.drain())

    def update(self, returns: Columns, num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Take a critic's optimizer steps on the rollout that it scored last."""
        with install.phase("step"):
            metrics = self.critic.update(returns, num_tokens)
        self.version += 1
        return (*metrics, *install.drain())

    def parts(self) -> Parts:
        """Return the objects that a critic's checkpoints hold."""
        return self.critic.checkpoint_parts()
