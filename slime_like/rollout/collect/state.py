"""State of the rollout side before the prompts of a rollout, and its files next to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.rollout.collect.partial import Unfinished, from_group, to_group
from slime_like.rollout.collect.prompt_queue import QueuedPrompt
from slime_like.types import SampleGroup


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Data cursor, and every prompt taken that no rollout contains: given back, or in an unfinished group."""

    cursor: Mapping[str, Any]  # of the data source
    returned: tuple[QueuedPrompt, ...]
    unfinished: tuple[Unfinished, ...]

    def in_flight(self) -> list[SampleGroup]:
        """Return everything but the cursor as groups to be saved; groups of prompts given back have negative ids."""
        returned = [SampleGroup(-1 - item.given_up, item.prompt, ()) for item in self.returned]
        return [*returned, *map(to_group, self.unfinished)]

    @staticmethod
    def of(cursor: Mapping[str, Any], groups: Sequence[SampleGroup]) -> RolloutState:
        """Return the inverse of ``in_flight``."""
        returned = tuple(QueuedPrompt(group.prompt, -1 - group.group_id) for group in groups if group.group_id < 0)
        return RolloutState(cursor, returned, tuple(from_group(group) for group in groups if group.group_id >= 0))


def made_path(leftover: Path, rollout_id: int) -> Path:
    """Return the path of a rollout that was generated but not trained on, next to the leftover groups."""
    return leftover.with_name(f"{leftover.stem}_made_{rollout_id}.npz")


def in_flight_path(leftover: Path) -> Path:
    """Return the path of groups in flight and prompts given back, next to the leftover groups."""
    return leftover.with_name(f"{leftover.stem}_in_flight.npz")
