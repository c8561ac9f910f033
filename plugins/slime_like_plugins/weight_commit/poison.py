"""Mark parameters as unwritten, and find elements that no update wrote. Torch only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NAMED = 3  # maximum number of parameters that an error names


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A parameter with elements that no update wrote."""

    name: str
    elements: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.elements} of {self.total} elements)"


def poison(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Fill every floating-point parameter with NaN, in place, because captured graphs may read its storage."""
    with torch.no_grad():
        for _, parameter in parameters:
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def unwritten(parameters: Iterable[tuple[str, Tensor]]) -> list[Unwritten]:
    """Return the parameters that contain NaN, in model order."""
    incomplete: list[Unwritten] = []
    for name, parameter in parameters:
        # The sum is NaN if any element is. Summing reads the parameter once; counting NaNs is slower.
        may_have_nan = parameter.is_floating_point() and bool(torch.isnan(parameter.sum()))
        if may_have_nan and (count := int(torch.isnan(parameter).sum())):
            incomplete.append(Unwritten(name, count, parameter.numel()))
    return incomplete


def incomplete_message(per_rank: list[list[Unwritten]]) -> str | None:
    """Return one error message for all tensor-parallel ranks; ``None`` if every element was written."""
    parts: list[str] = []
    for rank, incomplete in enumerate(per_rank):
        if incomplete:
            names = ", ".join(str(item) for item in incomplete[:MAX_NAMED])
            suffix = f" and {len(incomplete) - MAX_NAMED} more" if len(incomplete) > MAX_NAMED else ""
            parts.append(f"rank {rank}: {len(incomplete)} parameters: {names}{suffix}")
    if not parts:
        return None
    return f"weight update is not complete; parameters were missing, partly sent or sent as NaN: {'; '.join(parts)}"
