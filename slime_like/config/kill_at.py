"""``run.debug_kill_at``: where a run is to die, for tests of resuming."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_like.errors import ConfigError

PHASES = ("collect", "step", "push", "save")


@dataclass(frozen=True, slots=True)
class KillAt:
    """``seconds`` into a phase of a rollout, or at the phase's end when that comes first."""

    phase: str  # one of PHASES
    rollout_id: int
    seconds: float


def parse_kill_at(text: str) -> KillAt:
    """``push:3`` or ``push:3:0.25``. Raises ``ConfigError`` on anything else."""
    found = re.fullmatch(rf"({'|'.join(PHASES)}):(\d+)(?::(\d+(?:\.\d+)?))?", text)
    if found is None:
        raise ConfigError(
            f"run.debug_kill_at={text!r} is not phase:rollout or phase:rollout:seconds, "
            f"as in push:3:0.25; phases are {', '.join(PHASES)}"
        )
    return KillAt(found[1], int(found[2]), float(found[3] or 0))
