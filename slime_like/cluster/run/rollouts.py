"""Sources of the loop's groups: live engines, a dumped run, or demonstrations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Protocol

from ray import ObjectRef
from ray.actor import ActorHandle

from slime_like.checkpoint.files import write_text
from slime_like.cluster.workers.calls import call, is_ready, wait_first
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.data.demonstrations import Demonstrations
from slime_like.data.dump import load_groups, rollout_path
from slime_like.errors import CheckpointError, ConfigError, DataError
from slime_like.rollout.collect.state import generated_path, in_flight_path
from slime_like.rollout.generate.evaluate import EvalResult
from slime_like.rollout.manager import CollectedRollout
from slime_like.types import SampleGroup
from slime_like.util.deadline import Deadline
from slime_like.util.reading import Count, InputFile

FIX = "resume from another checkpoint, or start over with another run.dir"


@dataclass(frozen=True, slots=True)
class _SavedRollout:
    """A rollout that was generated ahead of training, without its groups."""

    rollout_id: Count
    groups: tuple[()]
    started: float
    stopped: float
    num_generated: Count
    num_refills: Count


@dataclass(frozen=True, slots=True)
class _SavedState:
    """``state_<N>.json`` of a run with engines."""

    next_rollout: Count
    cursor: dict[str, Any]
    made: tuple[_SavedRollout, ...]
    in_flight: Count = 0


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
    """Engines behind a rollout manager.

    If no engine is serving while a rollout is awaited, ``push_weights`` pushes weights to restarted engines.
    """

    manager: ActorHandle[RolloutActor]
    deadline_s: float
    push_weights: Callable[[], object] = lambda: None
    _push_needed_call: ObjectRef[None] | None = (
        None  # pending call to the manager that returns when an engine needs weights
    )

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the groups of one rollout."""
        return self._call(RolloutActor.collect, rollout_id)

    def evaluate(self) -> EvalResult:
        """Return metrics ``eval/<dataset>`` and answers under the engines' weights."""
        return self._call(RolloutActor.evaluate)

    def resize(self, num_engines: int) -> str:
        """Add or remove engines; return a description of the change."""
        return self._call(RolloutActor.resize_engines, num_engines)

    def save(self, folder: Path, next_rollout: int) -> None:
        """Save cursor and leftover groups."""
        state = self._call(RolloutActor.save_state, next_rollout, _leftover(folder, next_rollout))
        _write_state(folder, next_rollout, state)

    def load(self, folder: Path, next_rollout: int) -> None:
        """Restore the state written by ``save``."""
        self._call(RolloutActor.load_state, read_state(folder, next_rollout), _leftover(folder, next_rollout))

    def _call[**P, R](
        self, method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        deadline = Deadline("driver", method.__name__, self.deadline_s)
        if self._push_needed_call is not None and is_ready(self._push_needed_call):
            self._push_needed_call = None  # stale: the loop may have pushed since
        ref = call(self.manager, method, *args, **kwargs)
        while True:
            if self._push_needed_call is None:
                self._push_needed_call = call(self.manager, RolloutActor.wait_until_push_needed)
            pending: dict[str, ObjectRef[Any]] = {"rollout manager": ref, "its engines": self._push_needed_call}
            name, result = wait_first(pending, deadline)
            if name == "rollout manager":
                return result
            self._push_needed_call = None
            self.push_weights()


@dataclass(frozen=True, slots=True)
class ReplayRollout:
    """Rollouts read from the dumps of an earlier run."""

    dumps: Path

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the dumped rollout of this id."""
        start = time.time()
        return CollectedRollout(load_groups(rollout_path(self.dumps, rollout_id)), start, time.time(), ())

    def evaluate(self) -> EvalResult:
        """Return no metrics: there is no engine."""
        return EvalResult()

    def resize(self, num_engines: int) -> str:
        """Refuse: there is no engine."""
        raise ConfigError(NO_ENGINES.format(num_engines))

    def save(self, folder: Path, next_rollout: int) -> None:
        """Do nothing: the rollout id is the only state."""

    def load(self, folder: Path, next_rollout: int) -> None:
        """Do nothing: the rollout id is the only state."""


@dataclass(frozen=True, slots=True)
class DemonstrationRollout:
    """Rows whose label is the response, for supervised fine-tuning."""

    demonstrations: Demonstrations
    rows_per_rollout: int

    def collect(self, rollout_id: int) -> CollectedRollout:
        """Return the next rows as groups of one sample."""
        start = time.time()
        groups = self.demonstrations.next(self.rows_per_rollout, first_group_id=rollout_id * self.rows_per_rollout)
        return CollectedRollout(tuple(groups), start, time.time(), ())

    def evaluate(self) -> EvalResult:
        """Return no metrics: there is no engine."""
        return EvalResult()

    def resize(self, num_engines: int) -> str:
        """Refuse: there is no engine."""
        raise ConfigError(NO_ENGINES.format(num_engines))

    def save(self, folder: Path, next_rollout: int) -> None:
        """Save the cursor."""
        _write_state(folder, next_rollout, {"cursor": self.demonstrations.state()})

    def load(self, folder: Path, next_rollout: int) -> None:
        """Restore the state written by ``save``."""
        self.demonstrations.load_state(read_state(folder, next_rollout)["cursor"])


def _leftover(folder: Path, next_rollout: int) -> Path:
    return folder / "rollout" / f"leftover_{next_rollout}.npz"


def _state_path(folder: Path, next_rollout: int) -> Path:
    return folder / "rollout" / f"state_{next_rollout}.json"


def _write_state(folder: Path, next_rollout: int, state: dict[str, Any]) -> None:
    path = _state_path(folder, next_rollout)
    try:
        write_text(path, json.dumps(state))
    except OSError as error:
        raise CheckpointError(f"{path}: the save failed ({error.strerror}); is the disk full?") from error


def read_state(folder: Path, next_rollout: int) -> dict[str, Any]:
    """Return the rollout state of a checkpoint. Raises ``CheckpointError`` if it or its groups are missing or damaged."""
    file = InputFile(_state_path(folder, next_rollout), CheckpointError, FIX)
    state = file.json_object()
    if "made" not in state:  # from a run without engines, which has no groups
        return state
    saved_state = file.typed(state, _SavedState)
    generated_ids = [rollout.rollout_id for rollout in saved_state.made]
    if saved_state.next_rollout != next_rollout or generated_ids != [
        next_rollout + k for k in range(len(generated_ids))
    ]:
        raise file.refused(
            f"is for rollout {saved_state.next_rollout}, with {generated_ids} generated ahead, not for rollout {next_rollout}"
        )
    leftover = _leftover(folder, next_rollout)
    for path in (leftover, *(generated_path(leftover, rollout.rollout_id) for rollout in saved_state.made)):
        _saved_groups(path)
    if saved_state.in_flight:
        in_flight_groups = _saved_groups(in_flight_path(leftover))
        if len(in_flight_groups) != saved_state.in_flight or any(
            not s.spans for group in in_flight_groups for s in group.samples
        ):
            raise file.refused(
                f"has in_flight {saved_state.in_flight}, which {in_flight_path(leftover).name} does not hold"
            )
    return state


def check_cursor(folder: Path, next_rollout: int, source: Any) -> None:
    """Raise ``CheckpointError`` unless ``source`` can continue at the cursor of a checkpoint."""
    state = read_state(folder, next_rollout)
    try:
        source.load_state(state["cursor"])
    except (DataError, KeyError) as error:
        path = _state_path(folder, next_rollout)
        text = "has no cursor" if isinstance(error, KeyError) else f"does not fit: {error}"
        raise CheckpointError(f"{path} {text}; {FIX}") from error


def _saved_groups(path: Path) -> tuple[SampleGroup, ...]:
    """Load groups of a checkpoint. Raises ``CheckpointError``."""
    try:
        return load_groups(path)
    except DataError as error:
        raise CheckpointError(f"{path}: groups of this checkpoint are missing or damaged ({error}): {FIX}") from error
