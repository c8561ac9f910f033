"""Predicted memory of a GPU by phase of the loop, with ``placement.offload_train`` and ``placement.offload_rollout``.

For phase push, the memory at its end is predicted. There, the probe compares log-probabilities of engine and trainer. This
takes the whole engine and, on the trainer, the weights and a forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from slime_like.config.schema.residency import COLLECT, PUSH, SAVE, STEP, TRAINER_PHASES
from slime_like.planner.engine import ENGINE_REMAINDER, WEIGHT_ITEMS
from slime_like.planner.table import MemoryTable

ENGINE = "engine"
COMMUNICATORS = "communicators"
FIXED = ENGINE_REMAINDER
"""Items that a process keeps while all parts of its state are released. The workspace is outside SGLang's memory saver."""


@dataclass(frozen=True, slots=True)
class Offloads:
    """Settings for the release of memory.

    With ``train``, the trainer releases memory while engines run; with ``rollout``, engines release memory during training.
    """

    train: bool = False
    rollout: bool = False
    communicators: bool = False  # the trainer's are destroyed during rollouts (guard.release)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory of each role on a GPU in one phase."""

    name: str  # collect | step | push | save; empty if every phase has the same memory
    tables: tuple[tuple[str, MemoryTable], ...]

    @property
    def total(self) -> float:
        """Bytes of all roles."""
        return sum(table.total for _, table in self.tables)

    @property
    def min_total(self) -> float:
        """Bytes of all roles without the allocator's overhead."""
        return self.total - sum(table.of("allocator") for _, table in self.tables)


def phase_memory(
    roles: Mapping[str, MemoryTable], scoring: MemoryTable | None, offloads: Offloads
) -> tuple[PhaseMemory, ...]:
    """Return the memory of a GPU with ``roles`` in each phase.

    ``scoring`` is the memory of a trainer rank with weights only. The result is a single phase if nothing is offloaded, or
    if the GPU is not shared by an engine and another role.
    """
    shares_gpu = ENGINE in roles and len(roles) > 1
    if not shares_gpu or not (offloads.train or offloads.rollout):
        return (PhaseMemory("", tuple(roles.items())),)
    phases = (COLLECT, STEP, PUSH, SAVE)
    return tuple(PhaseMemory(phase, tuple(_tables(roles, scoring, offloads, phase))) for phase in phases)


def _tables(
    roles: Mapping[str, MemoryTable], scoring: MemoryTable | None, offloads: Offloads, phase: str
) -> Iterator[tuple[str, MemoryTable]]:
    for role, table in roles.items():
        if role == ENGINE:
            yield role, _engine(table, phase) if offloads.rollout else table
        elif not offloads.train or phase == STEP:
            yield role, table
        elif phase == PUSH and role == "trainer" and scoring is not None:
            yield role, scoring
        else:
            parts = TRAINER_PHASES[SAVE] if phase == SAVE else ()
            yield role, _part(table, parts, communicators=not (offloads.communicators and phase == COLLECT))


def _engine(table: MemoryTable, phase: str) -> MemoryTable:
    """Return the items of an engine that take memory in ``phase``.

    In phases collect and push these are all items, in phase save the weights and ``FIXED``, in phase step only ``FIXED``.
    """
    if phase in (COLLECT, PUSH):
        return table
    return _part(table, WEIGHT_ITEMS if phase == SAVE else ())


def _part(table: MemoryTable, names: Collection[str], *, communicators: bool = True) -> MemoryTable:
    """Return the items in ``names`` and in ``FIXED``, without the communicators if ``communicators`` is False."""
    item_names = {*names, *FIXED} - ({COMMUNICATORS} if not communicators else set())
    return MemoryTable(tuple(item for item in table.items if item.name in item_names), table.place)
