"""The dumped rollouts of a run that a report shows: the first, one in the middle, the last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.token_view import TokenTable, load_view, view_path
from slime_like.types import SampleGroup

GROUPS = 4  # of a rollout


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """Some groups of a rollout, and the trainer's view of some of their samples."""

    rollout_id: int
    groups: tuple[SampleGroup, ...]
    view: TokenTable | None


def sampled_rollouts(folder: Path, most: int = 3) -> list[SampledRollout]:
    """``most`` dumped rollouts of a run's ``rollouts`` folder, evenly over the run; none where it dumped none.

    Raises ``DataError`` naming a file that cannot be read.
    """
    found = (re.fullmatch(r"rollout_(\d+)\.npz", path.name) for path in sorted(folder.glob("rollout_*.npz")))
    ids = [int(match[1]) for match in found if match is not None]
    places = sorted({at * (len(ids) - 1) // max(1, most - 1) for at in range(most)}) if ids else []
    return [_load(folder, ids[at]) for at in places]


def _load(folder: Path, rollout_id: int) -> SampledRollout:
    groups = load_groups(rollout_path(folder, rollout_id))
    path = view_path(folder, rollout_id)
    return SampledRollout(rollout_id, groups[:GROUPS], load_view(path) if path.is_file() else None)
