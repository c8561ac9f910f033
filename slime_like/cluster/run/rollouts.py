"""Sources of the sample groups of the loop: live engines behind rollout managers, a dumped run, or demonstrations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Protocol

from ray import ObjectRef
from ray.actor import ActorHandle

from slime_like.cluster.run.rollout_state import (
    leftover_path,
    manager_base,
    manager_states,
    read_state,
    write_manager_states,
    write_state,
)
from slime_like.cluster.workers.calls import call, is_ready, wait_first, wait_settled
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.data.demonstrations import Demonstrations
from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.share import ManagerShare
from slime_like.errors import ConfigError
from slime_like.rollout.generate.evaluate import EvalResult, merge_evaluations
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.selection import CollectedRollout, GroupSelection
from slime_like.util.counted import counted
from slime_like.util.deadline import Deadline


@dataclass(frozen=True, slots=True)
class ManagerGroup:
    """Actors of all rollout managers, in the order of their shares of engines and data."""

    actors: tuple[ActorHandle[RolloutActor], ...]

    @property
    def shares(self) -> tuple[ManagerShare, ...]:
        """Share of each manager: its index and the number of managers."""
        return tuple(ManagerShare(index, len(self.actors)) for index in range(len(self.actors)))

    def start[**P, R](
        self, method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, ObjectRef[R]]:
        """Start a method on every manager; return the pending results by the managers' names."""
        return self.start_each(lambda actor, _: call(actor, method, *args, **kwargs))

    def start_each[R](
        self, start: Callable[[ActorHandle[RolloutActor], ManagerShare], ObjectRef[R]]
    ) -> dict[str, ObjectRef[R]]:
        """Call ``start`` with every manager and its share; return the pending results by the managers' names."""
        return {share.name: start(actor, share) for actor, share in zip(self.actors, self.shares, strict=True)}

    def call[**P, R](
        self,
        deadline: Deadline,
        method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every manager and return the results. Raises the same errors as ``wait_settled``."""
        return list(wait_settled(self.start(method, *args, **kwargs), deadline).values())


class RolloutSource(Protocol):
    """Source of a run's rollouts, with state that survives a restart."""

    def collect(self, rollout_id: int) -> CollectedRollout: ...
    def evaluate(self) -> EvalResult: ...
    def resize(self, num_engines: int) -> str: ...
    def save(self, folder: Path, next_rollout: int) -> None: ...
    def load(self, folder: Path, next_rollout: int) -> None: ...


NO_ENGINES = "engines={}: this run has no engines"


@dataclass(slots=True)
class EngineRollout:
    """Source of rollouts that engines generate under the control of rollout managers.

    While a call is awaited, ``push_weights`` is called if no engine of a manager serves and one waits for weights. It pushes
    weights to the engines of all managers.
    """

    managers: ManagerGroup
    selection: GroupSelection
    deadline_s: float
    push_weights: Callable[[], object] = lambda: None
    fewest_engines: int = sys.maxsize  # requested so far; initial engines with a higher index have been removed
    _push_needed_calls: dict[str, ObjectRef[None]] = field(
        default_factory=dict[str, ObjectRef[None]]
    )  # pending call to each manager, which returns when its engines need weights

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the groups of one rollout."""
        parts = self._wait("collect", self.managers.start(RolloutManager.collect, rollout_id))
        return self.selection.select(rollout_id, parts)

    def evaluate(self) -> EvalResult:
        """Return metrics (``eval/<dataset>*``, ``reward/*``) and, with ``evaluation.save_answers``, the responses.

        The responses are sampled with the engines' current weights.
        """
        return merge_evaluations(self._wait("evaluate", self.managers.start(RolloutManager.evaluate)))

    def resize(self, num_engines: int) -> str:
        """Add or remove engines; return a description of the change.

        Raises ``ConfigError`` if ``num_engines`` is not a multiple of the number of managers, or if a manager's
        ``resize_engines`` refuses the change.
        """
        num_managers = len(self.managers.actors)
        if num_engines % num_managers:
            lower = num_engines // num_managers * num_managers
            choice = f"{lower} or {lower + num_managers}" if lower else str(num_managers)
            raise ConfigError(
                f"engines={num_engines}: with rollout.num_managers={num_managers} every manager has the same number of engines: "
                f"request {choice}"
            )
        previous_fewest, self.fewest_engines = self.fewest_engines, min(self.fewest_engines, num_engines)
        try:
            changes = self._wait("resize", self.managers.start(RolloutManager.resize_engines, num_engines))
        except ConfigError:  # no engine was removed; after another error, some may have been
            self.fewest_engines = previous_fewest
            raise
        if num_managers == 1:
            return changes[0]
        named_changes = zip(self.managers.shares, changes, strict=True)
        return f"{counted(num_engines, 'engine')}; " + "; ".join(
            f"{share.name}: {change}" for share, change in named_changes
        )

    def save(self, folder: Path, next_rollout: int) -> None:
        """Save the managers' cursors and groups, and the groups carried over to rollout ``next_rollout``."""
        states = self._wait(
            "save_state",
            self.managers.start_each(
                lambda actor, share: call(
                    actor, RolloutManager.save_state, next_rollout, manager_base(folder, next_rollout, share)
                )
            ),
        )
        self.selection.save(leftover_path(folder, next_rollout))
        write_manager_states(folder, next_rollout, states)

    def load(self, folder: Path, next_rollout: int) -> None:
        """Restore the state written by ``save``."""
        states = manager_states(read_state(folder, next_rollout))
        self._wait(
            "load_state",
            self.managers.start_each(
                lambda actor, share: call(
                    actor, RolloutManager.load_state, states[share.index], manager_base(folder, next_rollout, share)
                )
            ),
        )
        self.selection.load(leftover_path(folder, next_rollout))

    def _wait[R](self, phase: str, refs: Mapping[str, ObjectRef[R]]) -> list[R]:
        """Return the results of a call to every manager; push weights whenever the engines of a manager need them."""
        deadline = Deadline("driver", phase, self.deadline_s)
        self._forget_ready_calls()  # stale: the loop may have pushed since
        results: dict[str, R] = {}
        while len(results) < len(refs):
            for actor, share in zip(self.managers.actors, self.managers.shares, strict=True):
                if share.name not in self._push_needed_calls:
                    self._push_needed_calls[share.name] = call(actor, RolloutManager.wait_until_push_needed)
            pending_refs: dict[str, ObjectRef[Any]] = {name: ref for name, ref in refs.items() if name not in results}
            push_calls: dict[str, ObjectRef[Any]] = {
                f"engines of the {name}": ref for name, ref in self._push_needed_calls.items()
            }
            name, result = wait_first(pending_refs, push_calls, deadline)
            if name in refs:
                results[name] = result
            else:
                self.push_weights()  # reaches the engines of every manager
                self._forget_ready_calls()
        return [results[name] for name in refs]

    def _forget_ready_calls(self) -> None:
        self._push_needed_calls = {name: ref for name, ref in self._push_needed_calls.items() if not is_ready(ref)}


@dataclass(frozen=True, slots=True)
class ReplayRollout:
    """Rollouts read from the dumps of an earlier run."""

    dumps: Path

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the dumped rollout ``rollout_id``."""
        start = time.time()
        return CollectedRollout(load_groups(rollout_path(self.dumps, rollout_id)), start, time.time(), ())

    def evaluate(self) -> EvalResult:
        """Return no metrics: there is no engine."""
        return EvalResult()

    def resize(self, num_engines: int) -> str:
        """Raise ``ConfigError``: the run has no engines."""
        raise ConfigError(NO_ENGINES.format(num_engines))

    def save(self, folder: Path, next_rollout: int) -> None:
        """Do nothing: the rollout id is the only state."""

    def load(self, folder: Path, next_rollout: int) -> None:
        """Do nothing: the rollout id is the only state."""


@dataclass(frozen=True, slots=True)
class DemonstrationRollout:
    """Source of rollouts for supervised fine-tuning: rows of data whose label is the response."""

    demonstrations: Demonstrations
    rows_per_rollout: int

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the next rows as groups of one sample each."""
        start = time.time()
        groups = self.demonstrations.next(self.rows_per_rollout, first_group_id=rollout_id * self.rows_per_rollout)
        return CollectedRollout(tuple(groups), start, time.time(), ())

    def evaluate(self) -> EvalResult:
        """Return no metrics: there is no engine."""
        return EvalResult()

    def resize(self, num_engines: int) -> str:
        """Raise ``ConfigError``: the run has no engines."""
        raise ConfigError(NO_ENGINES.format(num_engines))

    def save(self, folder: Path, next_rollout: int) -> None:
        """Save the position in the demonstrations as the state before rollout ``next_rollout``."""
        write_state(folder, next_rollout, {"cursor": self.demonstrations.state()})

    def load(self, folder: Path, next_rollout: int) -> None:
        """Restore the state written by ``save``."""
        self.demonstrations.load_state(manager_states(read_state(folder, next_rollout))[0]["cursor"])
