"""Selection of dumped rollouts for a report: the first, the middle and the last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.token_table import TokenTable, load_table, table_path
from slime_like.types import SampleGroup

MAX_GROUPS = 4  # per rollout


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """First groups of a rollout, and the trainer's table of tokens, which need not contain every sample of these groups."""

    rollout_id: int
    groups: tuple[SampleGroup, ...]
    token_table: TokenTable | None  # None if the run wrote none


def sampled_rollouts(folder: Path, max_rollouts: int = 3) -> list[SampledRollout]:
    """Return up to ``max_rollouts`` rollouts of a run's ``rollouts`` folder, evenly spaced.

    Raises ``DataError`` naming the file if a file cannot be read.
    """
    matches = (re.fullmatch(r"rollout_(\d+)\.npz", path.name) for path in sorted(folder.glob("rollout_*.npz")))
    ids = [int(match[1]) for match in matches if match is not None]
    indices = (
        sorted({index * (len(ids) - 1) // max(1, max_rollouts - 1) for index in range(max_rollouts)}) if ids else []
    )
    return [_load(folder, ids[index]) for index in indices]


def _load(folder: Path, rollout_id: int) -> SampledRollout:
    groups = load_groups(rollout_path(folder, rollout_id))
    path = table_path(folder, rollout_id)
    return SampledRollout(rollout_id, groups[:MAX_GROUPS], load_table(path) if path.is_file() else None)
