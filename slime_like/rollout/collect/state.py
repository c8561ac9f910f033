"""What the rollout side was at before the prompts of a rollout, and how it is written beside a checkpoint."""

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
    """Every prompt that was taken and that no rollout holds: it came back, or its group is unfinished."""

    cursor: Mapping[str, Any]  # of the data source
    returned: tuple[QueuedPrompt, ...]
    unfinished: tuple[Unfinished, ...]

    def in_flight(self) -> list[SampleGroup]:
        """All but the cursor, as groups that can be written; those of prompts that came back have ids below 0."""
        returned = [SampleGroup(-1 - waiting.given_up, waiting.prompt, ()) for waiting in self.returned]
        return [*returned, *map(to_group, self.unfinished)]

    @staticmethod
    def of(cursor: Mapping[str, Any], groups: Sequence[SampleGroup]) -> RolloutState:
        """The reverse of ``in_flight``."""
        returned = tuple(QueuedPrompt(group.prompt, -1 - group.group_id) for group in groups if group.group_id < 0)
        return RolloutState(cursor, returned, tuple(from_group(group) for group in groups if group.group_id >= 0))


def made_path(leftover: Path, rollout_id: int) -> Path:
    """Beside the leftover groups: a rollout that is made and not trained on."""
    return leftover.with_name(f"{leftover.stem}_made_{rollout_id}.npz")


def in_flight_path(leftover: Path) -> Path:
    """Beside the leftover groups: what was in flight, and prompts that came back."""
    return leftover.with_name(f"{leftover.stem}_in_flight.npz")
