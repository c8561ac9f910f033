"""A push: new weights into every engine, whole or not at all, proven by the probe."""

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

ABORT_S = 15.0  # above what rollout.push allows each half of it


class Sync(Protocol):
    """The third verb of the loop."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """Make the engines serve the trainer's weights as ``version``; returns the probe's metrics."""
        ...


class NoSync:
    """Nothing to push to, or nothing to push."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """No metrics."""
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
    max_score_tokens: int  # of a row that the trainer's ranks score
    max_losses: int  # engines that one push may lose

    def push(self, version: int) -> tuple[Metric, ...]:
        """Pause, send, commit, resume, probe; all of it again over the engines that are left where one is lost on the way.

        On failure every engine's locks are released before the error goes on.
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
            with contextlib.suppress(
                SlimeLikeError
            ):  # the reason of the failure matters more than how its undoing went
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
        found: tuple[ProbeScores, ...] = self._call("probe")
        if not found:
            return ()
        trainer = TrainerScores(found, self.max_score_tokens)
        trainer.take([self.trainer.score(rows) for rows in trainer.rows])
        metrics = [metric for scores in found for metric in probe.check(scores, trainer, version, self.tolerance)]
        if self.config.probe_layers:
            for kind in (*self.trainer.layer_kinds(), "all"):
                trainer.take([self.trainer.score(rows, kind) for rows in trainer.rows])
                metrics += [metric for scores in found for metric in probe.by_kind(scores, trainer, kind)]
        return tuple(metrics)

    def _call(self, verb: str, *args: Any) -> Any:
        deadline = Deadline("driver", f"push/{verb}", self.config.push_deadline_s)
        return wait_one("rollout manager", getattr(self.manager, verb).remote(*args), deadline)
