"""Itemised memory of one GPU or process."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.planner.constants import GIB, MIB


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a memory table."""

    name: str
    num_bytes: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Items whose sum is the memory of one GPU or process."""

    items: tuple[Item, ...]
    place: str = ""  # such as the pipeline stage of the process, if the processes of a role differ

    @property
    def total(self) -> float:
        """Sum of all items in bytes."""
        return sum(item.num_bytes for item in self.items)

    def of(self, *names: str) -> float:
        """Return the bytes of the items with these names."""
        return sum(item.num_bytes for item in self.items if item.name in names)


def items(*rows: tuple[str, float, str]) -> tuple[Item, ...]:
    """Return an item for each (name, bytes, note) whose bytes are not 0."""
    return tuple(Item(*row) for row in rows if row[1])


def gib(num_bytes: float) -> str:
    """Format bytes as GiB with one decimal. Below 1 GiB there are two decimals; below 0.1 GiB the unit is MiB."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / GIB:.{1 if abs(num_bytes) >= GIB else 2}f} GiB"
