"""The plan's part for the wrapper round collectives."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

from slime_like.config.guard_policy import GuardSpec, Policy, Threshold, overrides, table
from slime_like.config.root import TrainConfig

SHARED = Path("/dev/shm")
WIDTH = 96


def guard_spec(cfg: TrainConfig, name: str) -> GuardSpec:
    """What the ranks of the role ``name`` receive."""
    guard = cfg.guard
    default = Policy(
        checks=guard.checks,
        every=guard.every,
        threshold=Threshold.parse("guard.threshold", guard.threshold),
        hysteresis=guard.hysteresis,
        action=guard.action,
        budget=guard.budget,
    )
    return GuardSpec(
        wrap=guard.wrap,
        default=default,
        overrides=overrides("guard.", default, guard.ops, guard.groups),
        memory=guard.memory,
        symmetric=guard.symmetric,
        deadline_s=guard.deadline_s or cfg.loop.step_deadline_s,
        ring=guard.ring,
        folder=str(ring_folder(cfg.run.dir)),
        name=name,
    )


def ring_folder(run_dir: str) -> Path:
    """Where the ranks of a run keep their last collectives: one folder of shared memory per run folder and node."""
    return SHARED / f"slime_like.{hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:12]}"


def guard_lines(spec: GuardSpec) -> Iterator[str]:
    """Every op under the policy it has; then what groups have of their own."""
    if not spec.wrap:
        yield "guard      none: collectives are torch's own"
        return
    yield f"guard      {spec.memory} memory, deadline {spec.deadline_s:g} s{', as a group decision' * spec.symmetric}"
    ops: dict[str, list[str]] = {}
    for op, policy in table(spec):
        ops.setdefault(policy, []).append(op)
    for policy, names in ops.items():
        yield f"  {policy}"
        yield from (f"    {line}" for line in textwrap.wrap(", ".join(names), WIDTH))
