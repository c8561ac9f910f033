"""Dumped rollouts shown in a report: the first, the middle and the last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.token_view import TokenTable, load_view, view_path
from slime_like.types import SampleGroup

GROUPS = 4  # per rollout


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """Some groups of a rollout, and the trainer's view of some of their samples."""

    rollout_id: int
    groups: tuple[SampleGroup, ...]
    view: TokenTable | None


def sampled_rollouts(folder: Path, max_rollouts: int = 3) -> list[SampledRollout]:
    """Load up to ``max_rollouts`` rollouts of a run's ``rollouts`` folder, evenly spaced.

    Raises ``DataError`` naming an unreadable file.
    """
    matches = (re.fullmatch(r"rollout_(\d+)\.npz", path.name) for path in sorted(folder.glob("rollout_*.npz")))
    ids = [int(match[1]) for match in matches if match is not None]
    indices = (
        sorted({index * (len(ids) - 1) // max(1, max_rollouts - 1) for index in range(max_rollouts)}) if ids else []
    )
    return [_load(folder, ids[index]) for index in indices]


def _load(folder: Path, rollout_id: int) -> SampledRollout:
    groups = load_groups(rollout_path(folder, rollout_id))
    path = view_path(folder, rollout_id)
    return SampledRollout(rollout_id, groups[:GROUPS], load_view(path) if path.is_file() else None)
