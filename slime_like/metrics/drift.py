"""Warnings about a large or growing difference between the log-probabilities of trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

MEAN_DIFFERENCE = "train/train_rollout_logprob_abs_diff"
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}  # upper bound on the mean difference caused by rounding alone


@dataclass(slots=True)
class DriftWatch:
    """Comparison of each rollout's mean log-probability difference between trainer and engine with those of earlier rollouts.

    It warns if the mean is nan, above ``ceiling``, or above both ``rounding`` and ``factor`` times the median of the earlier
    rollouts since the start or resume. The same limits apply to the separate mean of samples that were begun with weights
    other than the trainer's current ones.
    """

    rounding: float  # largest mean that rounding can cause, see ``ROUNDING``
    ceiling: float  # limit that also applies to the first rollout
    factor: float | None  # None: never warn
    _means: list[float] = field(default_factory=list[float])
    _last_warnings: dict[str, float] = field(default_factory=dict[str, float])  # metric -> value of its last warning

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """Return a warning for each log-probability difference in ``metrics`` that is above its limit or nan.

        Call this once per rollout: it also records the mean difference, for the limit of later rollouts. While a metric stays
        above its limit, its warning is repeated only when the metric has grown by ``factor`` since the last one.
        """
        if self.factor is None:
            return []
        baseline = median(self._means) if self._means else None
        growth_limit = math.inf if baseline is None else max(self.rounding, self.factor * baseline)
        lines = [
            line
            for name in (MEAN_DIFFERENCE, f"{MEAN_DIFFERENCE}_mixed")
            if (value := metrics.get(name)) is not None and (line := self._warning(name, value, growth_limit, baseline))
        ]
        if math.isfinite(metrics.get(MEAN_DIFFERENCE, math.nan)):
            self._means.append(metrics[MEAN_DIFFERENCE])
        return lines

    def _warning(self, name: str, value: float, growth_limit: float, baseline: float | None) -> str | None:
        if value <= min(self.ceiling, growth_limit):  # False for nan
            self._last_warnings.pop(name, None)
            return None
        assert self.factor is not None
        if name in self._last_warnings and value <= self.factor * self._last_warnings[name]:
            return None
        if math.isfinite(value):
            self._last_warnings[name] = value
        comparison = f", the median of earlier rollouts is {baseline:.2g}" if baseline is not None else ""
        verdict = (
            f"grows (weights.drift_warning={self.factor:g})"
            if value > growth_limit
            else f"is not within {self.ceiling:g} (weights.probe_tolerance)"
        )
        return (
            f"{name} is {value:.2g}{comparison}: trainer and engine compute different log-probabilities, and the difference "
            f"{verdict}; run.dump_rollouts=true and weights.probe_layers=true show its cause, algo.use_tis=true corrects for "
            "it; weights.drift_warning=null turns this warning off"
        )
