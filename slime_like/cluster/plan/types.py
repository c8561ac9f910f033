"""What a plan is made of: decisions and roles."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.resolved import Layout


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that the config leaves open, what it became, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Role:
    """Processes of one kind; ``devices[i]`` are the GPUs of process i (of the run's, counted from 0), none on CPU."""

    name: str
    devices: tuple[tuple[int, ...], ...]
    layout: Layout | None = None  # of Megatron ranks


@dataclass(frozen=True, slots=True)
class Notes:
    """Collects decisions while a plan is made."""

    decisions: list[Decision]

    def add(self, key: str, value: object, reason: str) -> None:
        """Note what became of ``key``."""
        self.decisions.append(Decision(key, str(value), reason))
