"""Weight pushes: atomic on every engine, verified by the probe (``rollout.pool.probe``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Protocol

from slime_like.cluster.run.residency import Residency
from slime_like.cluster.run.rollouts import ManagerGroup
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.cluster.workers.trainer_group import TrainerGroup
from slime_like.config.schema.residency import PUSH
from slime_like.config.schema.resolved import TransportSpec
from slime_like.config.schema.run import WeightsConfig
from slime_like.data.routing import OWN_EXPERTS
from slime_like.errors import EngineLost, SlimeLikeError
from slime_like.interfaces import EngineAddress, TensorMeta
from slime_like.metrics.types import Metric
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.pool import probe
from slime_like.rollout.pool.probe import ProbeScores, TrainerScores
from slime_like.util.deadline import Deadline
from slime_like.weight_sync import manifest

ABORT_S = 20.0  # above twice rollout.pool.weight_update.ABORT_S


class Sync(Protocol):
    """Push of weights to the engines."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """Make the engines serve the trainer's weights as ``version``; return the probe's metrics."""
        ...


class NoSync:
    """Sync of a run without engines or without a trainer."""

    def push(self, version: int) -> tuple[Metric, ...]:
        """Do nothing and return no metrics."""
        del version
        return ()


@dataclass(frozen=True, slots=True)
class EngineSync:
    """Push of weights from a ``TrainerGroup`` to the engines of all rollout managers."""

    trainer: TrainerGroup
    managers: ManagerGroup
    manifest: dict[str, TensorMeta]
    transport: TransportSpec
    config: WeightsConfig
    tolerance: float
    max_score_tokens: int  # per row scored by the trainer's ranks
    max_losses: int  # engine losses allowed in one push, per engine
    residency: Residency | None  # None: no memory is moved before a push

    def push(self, version: int) -> tuple[Metric, ...]:
        """Pause, send, commit, resume, probe; if an engine is lost, start over with the remaining engines.

        Raises ``EngineLost`` if the push would start over more often than ``max_losses`` allows, ``WeightSyncError`` if the
        tensors sent are not those of ``manifest``, ``ConsistencyError`` if the probe finds a disagreement, and errors of the
        ranks and managers. Before an error of the push is raised, the managers resume the engines that respond, except those
        whose update has begun but is not committed.
        """
        num_losses = num_engines = 0
        # Outside ``try``: if it fails, there is no update to abort, and the engines must not take memory.
        if self.residency is not None:
            self.residency.enter(PUSH)
        try:
            while True:
                try:
                    if version == self.config.debug_skip_push_at:
                        self._call(RolloutManager.skip_push, version)
                        return self._probe(version)
                    engines = in_order(self._call(RolloutManager.begin_push))
                    num_engines = max(num_engines, len(engines))
                    return self._push(version, engines)
                except EngineLost:
                    num_losses += 1
                    if num_losses > max(1, num_engines) * self.max_losses:
                        raise
        except BaseException:
            with contextlib.suppress(SlimeLikeError):  # the original failure matters more than a failed abort
                self.managers.call(Deadline("driver", "abort push", ABORT_S), RolloutManager.abort_push)
            raise

    def _push(self, version: int, engines: Sequence[EngineAddress]) -> tuple[Metric, ...]:
        tensors = self.trainer.send_weights(engines, self.transport)
        manifest.check(version, self.manifest, tensors)
        num_unproven = sum(self._call(RolloutManager.commit_push, version))
        metrics = self._probe(version)
        if num_unproven:
            self._call(RolloutManager.admit_proven)
        return metrics

    def _probe(self, version: int) -> tuple[Metric, ...]:
        if self.config.probe_sequences == 0:
            return ()
        probe_scores = [scores for part in self._call(RolloutManager.probe) for scores in part]
        if not probe_scores:
            return ()
        trainer = TrainerScores(probe_scores, self.max_score_tokens)
        trainer.set_columns([self.trainer.score(rows) for rows in trainer.rows])
        metrics = [
            metric for scores in probe_scores for metric in probe.check(scores, trainer, version, self.tolerance)
        ]
        if probe_scores[0].experts:
            metrics += probe.check_experts(self.trainer.routing_difference(), version, self.tolerance)
            metrics += self._without_replay([scores.without_experts() for scores in probe_scores])
        if self.config.probe_layers:
            for kind in (*self.trainer.layer_kinds(), "all"):
                trainer.set_columns([self.trainer.score(rows, kind) for rows in trainer.rows])
                metrics += [metric for scores in probe_scores for metric in probe.layer_metrics(scores, trainer, kind)]
        return tuple(metrics)

    def _without_replay(self, probe_scores: Sequence[ProbeScores]) -> list[Metric]:
        """Return metrics that compare ``probe_scores`` with a trainer that chooses experts itself.

        ``probe_scores`` must name no experts, because the trainer would replay them.
        """
        trainer = TrainerScores(probe_scores, self.max_score_tokens)
        trainer.set_columns([self.trainer.score(rows) for rows in trainer.rows])
        return [metric for scores in probe_scores for metric in probe.layer_metrics(scores, trainer, OWN_EXPERTS)]

    def _call[**P, R](
        self, method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method of every manager and return the results. Raises the same errors as ``wait_settled``."""
        deadline = Deadline("driver", f"push/{method.__name__}", self.config.push_deadline_s)
        return self.managers.call(deadline, method, *args, **kwargs)


def in_order(addresses: Sequence[Sequence[EngineAddress]]) -> tuple[EngineAddress, ...]:
    """Return the engines of all managers in the order of their indices: engine 2 comes before engine 10."""
    return tuple(sorted((a for part in addresses for a in part), key=lambda address: (len(address.name), address.name)))
