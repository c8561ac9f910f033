"""Plan of the guard, the wrapper around collectives."""

from __future__ import annotations

import hashlib
import secrets
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy, Threshold, overrides, table
from slime_like.config.schema.root import TrainConfig
from slime_like.distributed.forensics.ring import PREFIX, SHARED

WIDTH = 96
_SECRET = secrets.token_bytes(16)  # random bytes of this process and its forks


def guard_spec(cfg: TrainConfig, name: str, *, release: bool = False, memory: str | None = None) -> GuardSpec:
    """Return the guard settings for the ranks of the role ``name``. Default of ``memory``: ``guard.memory``."""
    guard = cfg.guard
    default = MemoryPolicy(
        checks=guard.checks,
        every=guard.every,
        threshold=Threshold.parse("guard.threshold", guard.threshold),
        hysteresis=guard.hysteresis,
        action=guard.action,
        budget=guard.budget,
    )
    never = MemoryPolicy(checks="never")  # checks would disturb the measurement
    return GuardSpec(
        wrap=guard.wrap,
        default=never if guard.profile else default,
        overrides=() if guard.profile else overrides("guard.", default, guard.ops, guard.groups),
        memory=memory or guard.memory,
        symmetric=guard.symmetric,
        nodes=max(
            cfg.placement.actor_num_nodes, 2 if cfg.placement.ray_address else 1
        ),  # Ray may spread a group over nodes
        deadline_s=guard.deadline_s or cfg.loop.step_deadline_s,
        ring=guard.ring,
        release=release,
        profile=str(profile_folder(cfg.run.dir)) if guard.profile else None,
        folder=str(ring_folder(cfg.run.dir)),
        name=name,
    )


def memory_source(cfg: TrainConfig, device: str, note: Callable[[str, object, str], None]) -> str:
    """Return the value of ``guard.memory`` for a run on ``device``. It selects the memory that the guard queries.

    On a CPU, a value that stands for the memory of a GPU is replaced by ``host``, so that recipes for GPUs also run there;
    auto is kept. If the run trains and uses the guard, ``note`` records the replacement.
    """
    setting = cfg.guard.memory
    if device != "cpu" or setting in ("auto", "host"):
        return setting
    if cfg.guard.wrap and cfg.run.mode != "rollout_only":
        note("guard.memory", "host", f"placement.device is cpu: {setting} would read the memory of a GPU")
    return "host"


def releases(cfg: TrainConfig, device: str, world_size: int, note: Callable[[str, object, str], None]) -> bool:
    """Return True if the trainer's communicators are destroyed during rollouts.

    If ``guard.release`` is not set, the result is False, because releasing gloo's small buffers gains nothing and releasing
    NCCL's large ones has not been tested. If the run trains and uses the guard, ``note`` records this decision.
    """
    setting = cfg.guard.release
    if setting is not None or not cfg.guard.wrap or cfg.run.mode == "rollout_only":
        return bool(setting)
    shares_gpus = cfg.placement.mode == "colocated" and cfg.run.mode == "full" and not isinstance(cfg.algo, SftConfig)
    reasons = {
        "placement.device is cpu: gloo's buffers are small, and creating them again takes longer": device == "cpu",
        "no engine runs on the trainer's GPUs": not shares_gpus,
        "one trainer rank": world_size == 1,
    }
    measurement_note = "not yet measured with NCCL; guard.release=true may leave more memory to the engines, which share the trainer's GPUs"
    note("guard.release", "false", next((reason for reason, holds in reasons.items() if holds), measurement_note))
    return False


def ring_folder(run_dir: str) -> Path:
    """Return the folder in shared memory, one per run and node, in which ranks record their last collectives.

    Its name is unpredictable, so that another user can neither create it nor plant a link. The supervisor, the driver's parent
    process, derives the same name.
    """
    return SHARED / f"{PREFIX}{hashlib.sha256(_SECRET + str(Path(run_dir).resolve()).encode()).hexdigest()[:16]}"


def profile_folder(run_dir: str) -> Path:
    """Return the folder to which ``guard.profile`` writes the memory profiles of collective ops."""
    return Path(run_dir).resolve() / "collectives"


def guard_lines(spec: GuardSpec) -> Iterator[str]:
    """Yield lines that describe the guard, then each policy followed by its ops.

    An op whose policy is set for a single process group is preceded by the name of the group.
    """
    if not spec.wrap:
        yield "guard      none: torch's collectives are used directly"
        return
    yield f"guard      {spec.memory} memory, deadline {spec.deadline_s:g} s{', on all ranks at once' * spec.symmetric}"
    if spec.profile is not None:
        yield f"  every op is measured; the profile is written to {spec.profile}"
    if spec.release:
        yield "  communicators are destroyed during rollouts and created again for the next step"
    ops: dict[str, list[str]] = {}
    for op, policy in table(spec):
        ops.setdefault(policy, []).append(op)
    for policy, names in ops.items():
        yield f"  {policy}"
        yield from (f"    {line}" for line in textwrap.wrap(", ".join(names), WIDTH))
