"""Trainer of an actor together with a critic or a teacher.

It sends the scores of critic and teacher to the actor, and the critic's targets from the actor to the critic.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.batch import Columns, PackedBatch, TrainBatch
from slime_like.checkpoint.files import CRITIC
from slime_like.cluster.workers.calls import wait_all
from slime_like.cluster.workers.role_group import RoleGroup
from slime_like.cluster.workers.trainer_group import Refs, TrainerGroup
from slime_like.config.schema.roles import CriticConfig
from slime_like.errors import CheckpointError
from slime_like.metrics.types import Metric
from slime_like.types import F32, StepStats


@dataclass(slots=True)
class MultiRoleTrainer:
    """Trainer of several roles. ``step`` has three parts; within each, the roles run concurrently:

    score       critic and teacher score the rows; the actor scores them with its old and reference policy
    advantages  the actor computes advantages and the critic's targets from these scores
    update      actor and critic take their optimizer steps
    """

    actor: TrainerGroup
    critic: RoleGroup | None
    teacher: RoleGroup | None
    config: CriticConfig

    @property
    def version(self) -> int:
        """Version of the actor's weights."""
        return self.actor.version

    @property
    def _scorers(self) -> list[tuple[str, RoleGroup]]:
        scorers = (("values", self.critic), ("teacher_logprobs", self.teacher))
        return [(column, group) for column, group in scorers if group is not None]

    def step(self, batch: TrainBatch) -> StepStats:
        """Train on one rollout."""
        if not batch.steps:  # the filters dropped every group
            return self.actor.step(batch)
        columns, metrics = self._score(batch)
        answers = wait_all(self.actor.start_advantages(columns), self.actor.deadline("advantages"))
        refs = self.actor.start_update(batch, frozen=self.version < self.config.warmup_rollouts)
        if self.critic is not None:
            refs |= self.critic.start_update(self.actor.by_shard(answers), batch)
        reports = wait_all(refs, self.actor.deadline("update"))
        self.actor.version += 1
        return StepStats(self.version, (*metrics, *(metric for report in reports.values() for metric in report)))

    def _score(self, batch: TrainBatch) -> tuple[list[dict[str, Columns]], list[Metric]]:
        """Score the rows with all roles; return the scores of critic and teacher, and their metrics.

        For each data-parallel rank of the actor, the scores are a dict with "values" if there is a critic and
        "teacher_logprobs" if there is a teacher.
        """
        refs: Refs[Any] = {**self.actor.start_open(batch)}
        for _, group in self._scorers:
            refs |= group.start_score(batch)
        answers = wait_all(refs, self.actor.deadline("score"))
        ranks = len(batch.steps[0].micro_batches)
        columns: list[dict[str, Columns]] = [{} for _ in range(ranks)]
        metrics: list[Metric] = []
        for name, group in self._scorers:
            actor_columns, role_metrics = group.collect_scores(answers, batch, ranks)
            metrics += role_metrics
            for rank, column in enumerate(actor_columns):
                columns[rank][name] = column
        return columns, metrics

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32:
        """Return [T] log-probabilities of the actor."""
        return self.actor.score(batch, float64_kind)

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that the actor used."""
        return self.actor.kernels()

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return the actor's token advantages [L] by sample id, as ``TrainerGroup.token_advantages`` does."""
        return self.actor.token_advantages(sample_ids)

    def release_communicators(self) -> None:
        """Release the communicators of all roles until the next phase with collectives, if ``guard.release`` is set."""
        for group in (self.actor, self.critic, self.teacher):
            if group is not None:
                group.release_communicators()

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Begin a checkpoint of the current state of actor and critic.

        Raises ``CheckpointError`` if one of them cannot begin; no save is pending then.
        """
        if self.critic is not None:
            self.critic.begin_save(folder / CRITIC, iteration)
        try:
            self.actor.begin_save(folder, iteration)
        except CheckpointError:
            if self.critic is not None:
                self.critic.finish_save(wait=True)  # no save may stay open, since the next save starts from scratch
            raise

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the checkpoints of actor and critic are complete; with ``wait``, block until they are.

        Raises ``CheckpointError`` if one of them cannot be written, but only after a wait for the other one to end.
        """
        try:
            critic_done = self.critic is None or self.critic.finish_save(wait=wait)
        except CheckpointError:
            self.actor.finish_save(wait=True)
            raise
        try:
            return self.actor.finish_save(wait=wait) and critic_done
        except CheckpointError:
            if self.critic is not None and not critic_done:
                self.critic.finish_save(wait=True)
            raise

    def load(self, folder: Path, iteration: int) -> None:
        """Load the checkpoint ``iteration`` of actor and critic."""
        self.actor.load(folder, iteration)
        if self.critic is not None:
            self.critic.load(folder / CRITIC, iteration)

    def export_hf(self, folder: Path) -> None:
        """Write the actor's weights in HF format."""
        self.actor.export_hf(folder)
