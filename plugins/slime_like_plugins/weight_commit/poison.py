"""Marking parameters as unwritten, and finding those that still are. Torch only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SHOWN = 3  # parameters an error names


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A parameter with elements that no update wrote."""

    name: str
    elements: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.elements} of {self.total} elements)"


def poison(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Fill every floating parameter with NaN, in place: storages may be shared with captured graphs."""
    with torch.no_grad():
        for _, parameter in parameters:
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def unwritten(parameters: Iterable[tuple[str, Tensor]]) -> list[Unwritten]:
    """Parameters that hold NaN, in model order."""
    found: list[Unwritten] = []
    for name, parameter in parameters:
        # A sum is NaN where an element is, and reads the parameter once; counting them is slower.
        suspect = parameter.is_floating_point() and bool(torch.isnan(parameter.sum()))
        if suspect and (count := int(torch.isnan(parameter).sum())):
            found.append(Unwritten(name, count, parameter.numel()))
    return found


def complaint(per_rank: list[list[Unwritten]]) -> str | None:
    """One message for all tensor-parallel ranks, or ``None`` when every element was written."""
    parts: list[str] = []
    for rank, found in enumerate(per_rank):
        if found:
            names = ", ".join(str(item) for item in found[:SHOWN])
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            parts.append(f"rank {rank}: {len(found)} parameters: {names}{more}")
    if not parts:
        return None
    return f"weight update is not complete; not (wholly) sent, or sent as NaN: {'; '.join(parts)}"
