"""Warnings about a growing difference between trainer and engine, if no tolerance ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

DRIFT = "train/train_rollout_logprob_abs_diff"
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}  # upper bound on the mean difference caused by rounding alone


@dataclass(slots=True)
class DriftWatch:
    """Compares the mean difference of each rollout with the median over earlier rollouts of this run.

    A rollout drifts if its mean is above ``ceiling``, or above both ``rounding`` and ``factor`` times that median.
    """

    rounding: float
    ceiling: float  # warn above it even in the first rollout
    factor: float | None  # None: never warn
    _means: list[float] = field(default_factory=list[float])
    _last_warnings: dict[str, float] = field(default_factory=dict[str, float])  # metric -> value of its last warning

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """Return a line for each drift that is new or has grown by ``factor`` since its last warning."""
        if self.factor is None:
            return []
        baseline = median(self._means) if self._means else None
        limit = self.ceiling if baseline is None else min(self.ceiling, max(self.rounding, self.factor * baseline))
        lines = [
            line
            for name in (DRIFT, f"{DRIFT}_mixed")
            if (value := metrics.get(name)) is not None and (line := self._warning(name, value, limit, baseline))
        ]
        if math.isfinite(metrics.get(DRIFT, math.nan)):
            self._means.append(metrics[DRIFT])
        return lines

    def _warning(self, name: str, value: float, limit: float, baseline: float | None) -> str | None:
        if value <= limit:  # not above it, and not nan
            self._last_warnings.pop(name, None)
            return None
        assert self.factor is not None
        if name in self._last_warnings and value <= self.factor * self._last_warnings[name]:
            return None
        if math.isfinite(value):
            self._last_warnings[name] = value
        comparison = f", the median of the rollouts before is {baseline:.2g}" if baseline is not None else ""
        return (
            f"{name} is {value:.2g}{comparison}: trainer and engine drift apart, and what is trained on is less and less what "
            "was sampled; run.dump_rollouts=true and weights.probe_layers=true say where it comes from, algo.use_tis=true "
            "corrects for it (weights.drift_warning)"
        )
