"""Weight pushes: atomic on every engine, verified by the probe."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

from slime_like.cluster.workers.trainer_group import TrainerGroup
from slime_like.cluster.workers.trainer_worker import EngineAddress
from slime_like.cluster.workers.wait import wait_one
from slime_like.config.schema.resolved import TransportSpec
from slime_like.config.schema.run import WeightsConfig
from slime_like.errors import EngineLost, SlimeLikeError
from slime_like.interfaces import TensorMeta
from slime_like.metrics.types import Metric
from slime_like.rollout.pool import probe
from slime_like.rollout.pool.probe import ProbeScores, TrainerScores
from slime_like.util.deadline import Deadline
from slime_like.weights import manifest

ABORT_S = 15.0  # above the limits that rollout.push sets for each half


class Sync(Protocol):
    """The third verb of the loop."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """Make the engines serve the trainer's weights as ``version``; return the probe's metrics."""
        ...


class NoSync:
    """Sync of a run without engines or without a trainer."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """Return no metrics."""
        del version
        return ()


@dataclass(frozen=True, slots=True)
class EngineSync:
    """Pushes from a ``TrainerGroup`` to the engines behind a rollout manager."""

    trainer: TrainerGroup
    manager: Any  # Ray handle of RolloutActor
    manifest: dict[str, TensorMeta]
    transport: TransportSpec
    config: WeightsConfig
    tolerance: float
    max_score_tokens: int  # per row scored by the trainer's ranks
    max_losses: int  # engines that one push may lose

    def push(self, version: int) -> tuple[Metric, ...]:
        """Pause, send, commit, resume, probe; if an engine is lost, start over with the remaining engines.

        On failure all engine locks are released before the error propagates.
        """
        losses = 0
        try:
            while True:
                try:
                    return self._push(version)
                except EngineLost:
                    losses += 1
                    if losses > self.max_losses:
                        raise
        except BaseException:
            with contextlib.suppress(SlimeLikeError):  # the original failure matters more than a failed abort
                wait_one("rollout manager", self.manager.abort_push.remote(), Deadline("driver", "abort push", ABORT_S))
            raise

    def _push(self, version: int) -> tuple[Metric, ...]:
        if version == self.config.debug_skip_push_at:
            self._call("skip_push", version)
        else:
            engines: tuple[EngineAddress, ...] = self._call("begin_push")
            sent = self.trainer.push(engines, self.transport)
            manifest.check(version, self.manifest, sent)
            self._call("commit_push", version)
        return self._probe(version)

    def _probe(self, version: int) -> tuple[Metric, ...]:
        if self.config.probe_sequences == 0:
            return ()
        probe_scores: tuple[ProbeScores, ...] = self._call("probe")
        if not probe_scores:
            return ()
        trainer = TrainerScores(probe_scores, self.max_score_tokens)
        trainer.take([self.trainer.score(rows) for rows in trainer.rows])
        metrics = [
            metric for scores in probe_scores for metric in probe.check(scores, trainer, version, self.tolerance)
        ]
        if self.config.probe_layers:
            for kind in (*self.trainer.layer_kinds(), "all"):
                trainer.take([self.trainer.score(rows, kind) for rows in trainer.rows])
                metrics += [metric for scores in probe_scores for metric in probe.by_kind(scores, trainer, kind)]
        return tuple(metrics)

    def _call(self, verb: str, *args: Any) -> Any:
        deadline = Deadline("driver", f"push/{verb}", self.config.push_deadline_s)
        return wait_one("rollout manager", getattr(self.manager, verb).remote(*args), deadline)
