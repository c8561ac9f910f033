"""Rollout state of a checkpoint: the data cursors of the rollout managers, and the files with their groups.

``rollout/state_<N>.json`` contains the state of a single manager, or a list ``managers`` with the states of several. In
supervised fine-tuning, it contains only the cursor in the demonstrations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import new_run_hint, write_text
from slime_like.data.dump import load_groups
from slime_like.data.share import ManagerShare
from slime_like.errors import CheckpointError, DataError
from slime_like.rollout.collect.state import generated_path, in_flight_path
from slime_like.types import SampleGroup
from slime_like.util.reading import Count, InputFile

FIX = "resume from another checkpoint, or start over with another run.dir"


@dataclass(frozen=True, slots=True)
class _SavedRollout:
    """A rollout that was generated ahead of training. Its groups are in a file of their own."""

    rollout_id: Count
    groups: tuple[()]
    started: float
    stopped: float
    num_generated: Count
    num_refills: Count


@dataclass(frozen=True, slots=True)
class _SavedState:
    """State of one rollout manager."""

    next_rollout: Count
    cursor: dict[str, Any]
    made: tuple[_SavedRollout, ...]
    in_flight: Count = 0


@dataclass(frozen=True, slots=True)
class _SavedStates:
    """States of several rollout managers."""

    managers: tuple[_SavedState, ...]


def leftover_path(folder: Path, next_rollout: int) -> Path:
    """Return the path of the file with the groups carried over to rollout ``next_rollout``."""
    return folder / "rollout" / f"leftover_{next_rollout}.npz"


def manager_base(folder: Path, next_rollout: int, share: ManagerShare) -> Path:
    """Return the path from which the paths of a manager's own files are derived."""
    path = leftover_path(folder, next_rollout)
    return path if share.num_shares == 1 else path.with_name(f"{path.stem}_manager_{share.index}.npz")


def state_path(folder: Path, next_rollout: int) -> Path:
    """Return the path of the file with the state before rollout ``next_rollout``."""
    return folder / "rollout" / f"state_{next_rollout}.json"


def write_state(folder: Path, next_rollout: int, state: dict[str, Any]) -> None:
    """Write the rollout state of a run. Raises ``CheckpointError`` if the file cannot be written."""
    path = state_path(folder, next_rollout)
    try:
        write_text(path, json.dumps(state))
    except OSError as error:
        raise CheckpointError(f"{path}: the save failed ({error.strerror}); is the disk full?") from error


def write_manager_states(folder: Path, next_rollout: int, states: Sequence[dict[str, Any]]) -> None:
    """Write the states of all managers to one file. Raises ``CheckpointError`` if it cannot be written."""
    write_state(folder, next_rollout, states[0] if len(states) == 1 else {"managers": list(states)})


def manager_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each manager in the rollout state of a checkpoint."""
    return state.get("managers", [state])


def read_state(folder: Path, next_rollout: int) -> dict[str, Any]:
    """Return the rollout state of a checkpoint except its groups.

    Raises ``CheckpointError`` if the file is missing, damaged or for another rollout.
    """
    return _read(folder, next_rollout)[1]


def check_state(folder: Path, next_rollout: int) -> None:
    """Raise ``CheckpointError`` if the rollout state of a checkpoint cannot be used.

    The state file may be missing, damaged or for another rollout, or a group file may be missing, damaged or incomplete.
    """
    file, _, saved_states = _read(folder, next_rollout)
    if not saved_states:  # from a run without engines, which has no groups
        return
    _saved_groups(leftover_path(folder, next_rollout))
    for index, state in enumerate(saved_states):
        _check_groups(file, state, manager_base(folder, next_rollout, ManagerShare(index, len(saved_states))))


def _read(folder: Path, next_rollout: int) -> tuple[InputFile, dict[str, Any], tuple[_SavedState, ...]]:
    """Return the state file of a checkpoint, its JSON object and the states of its managers (none in a run without engines).

    Raises ``CheckpointError`` if the file is missing, damaged or for another rollout. A file without managers names no rollout.
    """
    file = InputFile(state_path(folder, next_rollout), CheckpointError, FIX)
    state = file.json_object()
    saved_states: tuple[_SavedState, ...] = ()
    if "managers" in state:
        saved_states = file.typed(state, _SavedStates).managers
        if len(saved_states) < 2:
            raise file.refused(
                f"has a list of {len(saved_states)} managers, but such a list is written only for two or more managers"
            )
    elif "made" in state:
        saved_states = (file.typed(state, _SavedState),)
    for saved in saved_states:
        generated_ids = [rollout.rollout_id for rollout in saved.made]
        if saved.next_rollout != next_rollout or generated_ids != [next_rollout + k for k in range(len(generated_ids))]:
            raise file.refused(
                f"is for rollout {saved.next_rollout}, with {generated_ids} generated ahead, not for rollout {next_rollout}"
            )
    return file, state, saved_states


def check_num_managers(folder: Path, next_rollout: int, num_managers: int) -> None:
    """Raise ``CheckpointError`` unless a checkpoint contains the cursors of exactly ``num_managers`` managers."""
    num_saved = len(manager_states(read_state(folder, next_rollout)))
    if num_saved != num_managers:
        raise CheckpointError(
            f"{state_path(folder, next_rollout)}: saved with rollout.num_managers={num_saved}, and cannot be continued with "
            f"{num_managers}, because each manager has its own prompts: set rollout.num_managers={num_saved}"
        )


def check_cursor(folder: Path, next_rollout: int, source: Any) -> None:
    """Raise ``CheckpointError`` unless ``source`` can continue at every cursor of a checkpoint.

    Afterwards, ``source`` is at the first cursor.
    """
    for state in reversed(manager_states(read_state(folder, next_rollout))):
        try:
            source.load_state(state["cursor"])
        except KeyError as error:
            raise CheckpointError(f"{state_path(folder, next_rollout)} has no cursor; {FIX}") from error
        except DataError as error:
            path = state_path(folder, next_rollout)
            raise CheckpointError(f"{path} does not fit: {error}, or {new_run_hint(folder)}") from error


def _check_groups(file: InputFile, state: _SavedState, base: Path) -> None:
    """Raise ``CheckpointError`` if a manager's group file is missing, damaged or incomplete. Its path derives from ``base``."""
    for rollout in state.made:
        _saved_groups(generated_path(base, rollout.rollout_id))
    if state.in_flight:
        in_flight_groups = _saved_groups(in_flight_path(base))
        if len(in_flight_groups) != state.in_flight or any(
            not s.spans for group in in_flight_groups for s in group.samples
        ):
            raise file.refused(
                f"has in_flight={state.in_flight}, but {in_flight_path(base).name} does not contain {state.in_flight} groups with "
                "generated tokens"
            )


def _saved_groups(path: Path) -> tuple[SampleGroup, ...]:
    """Return the groups in a file of a checkpoint. Raises ``CheckpointError`` if it is missing or damaged."""
    try:
        return load_groups(path)
    except DataError as error:
        raise CheckpointError(f"{path}: groups of this checkpoint are missing or damaged ({error}): {FIX}") from error
