"""Elements of a plan: decisions, roles, and the shapes of their models."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.resolved import Layout
from slime_like.planner.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Decision:
    """Value that the plan chose for a config key left open by the user, or for another quantity, with the reason."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks or engines of one kind; ``devices[i]`` are the GPUs of rank or engine i (run-local indices from 0), none on CPU."""

    name: str
    devices: tuple[tuple[int, ...], ...]
    layout: Layout | None = None  # layout of Megatron ranks


def num_gpus(roles: tuple[Role, ...]) -> int:
    """Return the number of GPUs that ``roles`` use. A GPU that several roles share counts once."""
    return len({index for role in roles for devices in role.devices for index in devices})


@dataclass(frozen=True, slots=True)
class RoleShapes:
    """Shapes of the models of a run; None for a role that the run lacks, or whose model is not known yet."""

    actor: ModelShape | None
    critic: ModelShape | None = None
    teacher: ModelShape | None = None
    unknown: str = "run.prepare has not written the model yet"  # the reason, if the actor's shape is not known


@dataclass(frozen=True, slots=True)
class PlanDecisions:
    """Decisions collected during planning."""

    entries: list[Decision]

    def add(self, key: str, value: object, reason: str) -> None:
        """Record the resolved value of ``key``."""
        self.entries.append(Decision(key, str(value), reason))
