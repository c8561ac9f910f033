"""guard.*: the wrapper round the trainer's collectives: its memory guard per op, deadline and record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.base import Config, key, positive, within
from slime_like.config.schema.guard_policy import ACTIONS, CHECKS, MemoryPolicy, Threshold, overrides
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GuardConfig(Config):
    """The wrapper round the trainer's collectives. guard=auto|slime|always|off chooses a whole; docs/guard.md says how."""

    wrap: bool = key(True, "Wrap collectives: counts, memory guard, errors that name ranks; false: torch's, untouched.")
    checks: str = key(
        "auto",
        "When free memory is asked for before an op: always, never, every_n calls, below (always, but acts once per "
        "shortage), auto (below, as often as guard.budget allows, sooner when memory runs out).",
        choices=CHECKS,
    )
    every: int = key(100, "Calls of an op in a group between two checks under every_n.")
    threshold: str = key("3GiB", "Free memory below which guard.action is taken: bytes (3GiB) or a fraction (0.05).")
    hysteresis: float = key(
        0.25, "below, auto: after an action, none until free memory exceeds threshold * (1 + this)."
    )
    action: str = key(
        "clear",
        "none: count; trim: give cached blocks back; clear: synchronise, collect garbage, trim; raise: end the run.",
        choices=ACTIONS,
    )
    budget: float = key(0.001, "auto: largest share of time spent on asking.")
    memory: str = key(
        "auto",
        "Who is asked: driver (CUDA), allocator (torch's, of CUDA), host (with cgroup limits); auto: driver, or host on CPU.",
        choices=("auto", "driver", "allocator", "host"),
    )
    symmetric: bool = key(
        False, "What one rank does for want of memory, all ranks of its role do before their next op."
    )
    ops: dict[str, Any] = key({}, "Policy per op: guard.ops.barrier=never, guard.ops.all_reduce={checks: below}.")
    groups: dict[str, Any] = key({}, "Policy per process group (tp, dp, world...), in which ops may stand again.")
    deadline_s: float | None = key(None, "Longest time of one collective; null: loop.step_deadline_s.")
    release: bool | None = key(
        None,
        "Destroy the trainer's communicators while rollouts run, make them again for the next step; null: no, and the plan "
        "says why.",
    )
    profile: bool = key(
        False,
        "Measure the memory that each op takes, guard nothing, write run.dir/collectives: scripts/profile_comm.py.",
    )
    ring: int = key(1024, "Last ops that each rank keeps for other processes to read after a hang.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "every", "budget", "deadline_s", "ring")
        within(prefix, self, 0.0, 0.1, "budget")
        within(prefix, self, 0.0, 10.0, "hysteresis")
        for name in ("release", "profile"):
            if getattr(self, name) and not self.wrap:
                raise ConfigError(
                    f"{prefix}{name}=true needs the wrapper: set {prefix}wrap=true, or choose another guard= than off"
                )
        Threshold.parse(f"{prefix}threshold", self.threshold)
        overrides(prefix, MemoryPolicy(), self.ops, self.groups)
