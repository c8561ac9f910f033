"""Typed metrics and the interface of their sinks. The type of a metric determines how the driver reduces it.

Example: two ranks report ``Mean("train/loss", 3.0, weight=2.0)`` and ``Mean("train/loss", 6.0, weight=1.0)``;
``reduce_metrics`` gives ``{"train/loss": 4.0}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True)
class Mean:
    """Weighted mean of the reported values."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of the reported values."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Max:
    """Maximum of the reported values."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Min:
    """Minimum of the reported values."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Last:
    """Value of the last report, such as a learning rate, a version or a quantile."""

    name: str
    value: float


Metric = Mean | Sum | Max | Min | Last


@dataclass(frozen=True, slots=True)
class RunWarning:
    """Warning for the user. ``example`` quotes prompts or responses and must not leave the machine."""

    text: str
    example: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n  for example {self.example}" if self.example else self.text


StepSpans = Mapping[str, tuple[float, float]]
"""Phase of a step -> its start and stop in unix seconds."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Argument of a sink's constructor: the run whose metrics it receives."""

    run_dir: Path
    first_step: int  # step that a resumed run continues from; 0 in a new run
    num_steps: int
    settings: Mapping[str, Any]  # the run's config; contains no prompts


class Sink(Protocol):
    """Destination of reduced metrics (``metrics.sinks``). ``KeepsWarnings`` and ``ShowsNotes`` declare optional methods."""

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one step."""
        ...

    def close(self) -> None:
        """Release resources at the end of the run."""
        ...


@runtime_checkable
class KeepsWarnings(Protocol):
    """A ``Sink`` that records the warnings of a run."""

    def warn(self, step: int, warning: RunWarning) -> None:
        """Record a warning of ``step``."""
        ...


@runtime_checkable
class ShowsNotes(Protocol):
    """A ``Sink`` that shows notes, such as a message about damaged lines of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Show one line of text."""
        ...


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return one number per name, nan for a ``Mean`` without weight.

    Raises ``ValueError`` if metrics of one name have different types.
    """
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    return {name: _reduce(name, group) for name, group in by_name.items()}


def _reduce(name: str, metrics: list[Metric]) -> float:
    kinds = {type(m) for m in metrics}
    if len(kinds) > 1:
        raise ValueError(f"metric {name!r} is reported as {sorted(k.__name__ for k in kinds)}: choose one reduction")
    values = np.array([m.value for m in metrics], dtype=np.float64)
    match metrics[0]:
        case Mean():
            weights = np.array([m.weight for m in metrics if isinstance(m, Mean)], dtype=np.float64)
            total = float(weights.sum())
            return float((values * weights).sum() / total) if total > 0 else float("nan")
        case Sum():
            return float(values.sum())
        case Max():
            return float(values.max())
        case Min():
            return float(values.min())
        case Last():
            return float(values[-1])
