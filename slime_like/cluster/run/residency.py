"""Move the state of trainer and engines on and off their shared GPUs by phase of the loop.

Before each phase, only the parts of the state that the phase needs are kept on the GPUs; ``config.schema.residency`` lists
them. If one side, trainer or engines, releases memory for the other, it does so before the other side allocates it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slime_like.batch import PackedBatch, TrainBatch
from slime_like.cluster.run.rollouts import ManagerGroup, RolloutSource
from slime_like.config.schema.residency import COLLECT, PUSH, SAVE, STEP, TRAINER_PARTS, TRAINER_PHASES
from slime_like.interfaces import Trainer
from slime_like.metrics.types import Last, Metric
from slime_like.rollout.generate.evaluate import EvalResult
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.selection import CollectedRollout
from slime_like.types import F32, StepStats
from slime_like.util.deadline import Deadline


class RankStates(Protocol):
    """Ranks of one role, whose state can be moved off their devices."""

    def keep_on_device(self, parts: Sequence[str]) -> None:
        """Keep only ``parts`` on the device of every rank."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStates:
    """Engines of the rollout managers, whose state can be moved off their devices."""

    managers: ManagerGroup
    deadline_s: float

    def enter(self, phase: str) -> None:
        """Release the engine memory that ``phase`` does not need; in phase collect, restore it (``PoolMemory.enter``)."""
        deadline = Deadline("driver", f"offload/{phase}", self.deadline_s)
        self.managers.call(deadline, RolloutManager.enter_phase, phase)


@dataclass(slots=True)
class Residency:
    """Controller that moves parts of trainer and engines onto and off their devices, unless they are already in place."""

    actor: RankStates | None = None  # None: the trainer's ranks stay on their devices
    other_roles: tuple[RankStates, ...] = ()  # critic and teacher, which have no part in a push
    engines: EngineStates | None = None  # None: they stay on their devices
    _parts: tuple[str, ...] | None = field(default=TRAINER_PARTS)  # parts of each rank; None after a failed move
    _engine_phase: str | None = field(default=COLLECT)
    _seconds: float = field(default=0.0)  # spent moving since ``drain_metrics``

    def enter(self, phase: str) -> None:
        """Move the parts that ``phase`` does not need off the devices, then move the parts that it needs onto them.

        In phase push, the push itself moves the engines' parts; when it ends, all parts of the engines are on the devices.
        Phase save restores no part of the engines.
        """
        start = time.perf_counter()
        if phase in (STEP, SAVE):
            self._move_engines(phase)
            self._keep(TRAINER_PHASES[phase])
        else:
            self._keep(TRAINER_PHASES[phase])
            if phase == COLLECT:
                self._move_engines(phase)
            self._engine_phase = COLLECT
        self._seconds += time.perf_counter() - start

    def drain_metrics(self) -> tuple[Metric, ...]:
        """Return the seconds spent on moves since the last call as a metric; no metric if the run never moves any part."""
        seconds, self._seconds = self._seconds, 0.0
        return (Last("perf/offload_time", seconds),) if self.actor or self.engines else ()

    def _keep(self, parts: tuple[str, ...]) -> None:
        if parts == self._parts:
            return
        self._parts = None
        other_parts = () if parts == TRAINER_PHASES[PUSH] else parts
        for role in self.other_roles:
            role.keep_on_device(other_parts)
        if self.actor is not None:
            self.actor.keep_on_device(parts)
        self._parts = parts

    def _move_engines(self, phase: str) -> None:
        if self.engines is None or phase == self._engine_phase:
            return
        self._engine_phase = None
        self.engines.enter(phase)
        self._engine_phase = phase


@dataclass(frozen=True, slots=True)
class ResidentTrainer:
    """Wrapper around a trainer. Before each call, it moves the required state to the devices of the ranks."""

    trainer: Trainer
    residency: Residency

    @property
    def version(self) -> int:
        """Version of the actor's weights."""
        return self.trainer.version

    def step(self, batch: TrainBatch) -> StepStats:
        """Train on one rollout."""
        self.residency.enter(STEP)
        stats = self.trainer.step(batch)
        return StepStats(stats.version, (*stats.metrics, *self.residency.drain_metrics()))

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32:
        """Move the state of phase "step" to the devices, then return the log-probabilities [T] of ``batch``.

        The optimizer steps of the same rollout follow and need the same state.
        """
        self.residency.enter(STEP)
        return self.trainer.score(batch, float64_kind)

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that the actor used."""
        return self.trainer.kernels()

    def token_advantages(self, sample_ids: Collection[int]) -> Mapping[int, F32]:
        """Return a dict from sample id to the per-token advantages [L] of the actor.

        No state is moved, because the advantages are in host memory.
        """
        return self.trainer.token_advantages(sample_ids)

    def release_communicators(self) -> None:
        """Release the communicators if ``guard.release`` is set; the next call that needs them creates them again."""
        self.trainer.release_communicators()

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Begin to save a checkpoint. Its files are written from a copy in host memory."""
        self.residency.enter(SAVE)
        self.trainer.begin_save(folder, iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Complete any pending save and return True. Without ``wait``, return False if a rank is still writing."""
        return self.trainer.finish_save(wait=wait)

    def load(self, folder: Path, iteration: int) -> None:
        """Load the checkpoint ``iteration`` of ``folder``."""
        self.residency.enter(STEP)
        self.trainer.load(folder, iteration)

    def export_hf(self, folder: Path) -> None:
        """Write the actor's weights in HF format."""
        self.residency.enter(SAVE)
        self.trainer.export_hf(folder)


@dataclass(frozen=True, slots=True)
class ResidentRollout:
    """Wrapper around a source of rollouts. It gives the devices' memory to the engines while they sample."""

    rollout: RolloutSource
    residency: Residency

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the groups of one rollout."""
        self.residency.enter(COLLECT)
        return self.rollout.collect(rollout_id)

    def evaluate(self) -> EvalResult:
        """Evaluate on the held-out prompts; return metrics and responses."""
        self.residency.enter(COLLECT)
        return self.rollout.evaluate()

    def resize(self, num_engines: int) -> str:
        """Add or remove engines; return a description of the change. Raises the errors of the wrapped source."""
        return self.rollout.resize(num_engines)

    def save(self, folder: Path, next_rollout: int) -> None:
        """Save the state of the rollout source, which is in host memory, so nothing is moved."""
        self.rollout.save(folder, next_rollout)

    def load(self, folder: Path, next_rollout: int) -> None:
        """Restore the state written by ``save``."""
        self.rollout.load(folder, next_rollout)


def pushes_within(push: Callable[[], object], residency: Residency) -> Callable[[], object]:
    """Return the ``push_weights`` of an ``EngineRollout``: it calls ``push``, then gives the memory back to the engines."""

    def push_and_continue() -> None:
        push()
        residency.enter(COLLECT)

    return push_and_continue
