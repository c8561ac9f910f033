"""guard.*: wrapper around the trainer's collectives with a memory guard, deadlines and a record of ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.base import Config, key, positive, within
from slime_like.config.schema.guard_policy import ACTIONS, CHECKS, MemoryPolicy, Threshold, overrides
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GuardConfig(Config):
    """Wrapper around the trainer's collectives. guard=auto|slime|always|off chooses a preset; see docs/guard.md."""

    wrap: bool = key(
        True,
        "Wrap collectives, which adds counts, the memory guard and errors that name ranks; false: do not wrap them.",
    )
    checks: str = key(
        "auto",
        "When to query free memory before an op: always, never, every_n calls, below (always, but act once per "
        "shortage) or auto (like below, but only as often as guard.budget allows, more often as memory runs low).",
        choices=CHECKS,
    )
    every: int = key(100, "Under checks=every_n, number of calls of an op in a group per query.")
    threshold: str = key("3GiB", "Free memory below which guard.action runs: bytes (3GiB) or a fraction (0.05).")
    hysteresis: float = key(
        0.25, "Under checks=below or auto, no further action until free memory exceeds threshold * (1 + hysteresis)."
    )
    action: str = key(
        "clear",
        "none: only count; trim: free cached blocks; clear: synchronise, collect garbage, trim; raise: end the run.",
        choices=ACTIONS,
    )
    budget: float = key(0.001, "Under checks=auto, maximum fraction of time spent on queries.")
    memory: str = key(
        "auto",
        "Source of the free-memory reading: driver (CUDA), allocator (torch's CUDA allocator), host (with cgroup limits); auto: driver. On a CPU: always host.",
        choices=("auto", "driver", "allocator", "host"),
    )
    symmetric: bool = key(
        False, "When one rank acts on low memory, all ranks of its role take the same action before their next op."
    )
    ops: dict[str, Any] = key({}, "Policy per op: guard.ops.barrier=never, guard.ops.all_reduce={checks: below}.")
    groups: dict[str, Any] = key(
        {}, "Policy per process group (tp, dp, world...), which may contain ops: guard.groups.tp.ops.all_reduce=never."
    )
    deadline_s: float | None = key(None, "Time limit of one collective; null: loop.step_deadline_s.")
    release: bool | None = key(
        None,
        "Destroy the trainer's communicators during rollouts and recreate them for the next step; null: false, and the plan gives "
        "the reason.",
    )
    profile: bool = key(
        False,
        "Measure memory use per op without guarding and write it to run.dir/collectives; see scripts/profile_comm.py.",
    )
    ring: int = key(
        1024, "Number of most recent ops that each rank records; other processes can read the record after a hang."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "every", "budget", "deadline_s", "ring")
        within(prefix, self, 0.0, 0.1, "budget")
        within(prefix, self, 0.0, 10.0, "hysteresis")
        for name in ("release", "profile"):
            if getattr(self, name) and not self.wrap:
                raise ConfigError(
                    f"{prefix}{name}=true needs the wrapper around collectives: set {prefix}wrap=true, or choose "
                    "a preset other than guard=off"
                )
        Threshold.parse(f"{prefix}threshold", self.threshold)
        overrides(prefix, MemoryPolicy(), self.ops, self.groups)
