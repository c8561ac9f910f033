"""Comparison of two runs: the first step at which each metric differs, and the config keys that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.metrics import dictionary
from slime_like.report.record import RunRecord, flat

TIME_UNITS = ("s", "tokens/s")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Curves of one metric in runs A and B, and their difference."""

    metric: str
    a: tuple[tuple[int, float], ...]
    b: tuple[tuple[int, float], ...]
    num_common: int  # number of steps that both runs have
    step: int | None  # the first of these steps at which the values differ; None if they agree
    largest: float  # largest |a - b| that is not nan, over the common steps; nan if there is none

    @property
    def values(self) -> tuple[float, float]:
        """Return the values of A and B at ``step``. Use this only if ``step`` is not None."""
        return dict(self.a)[self.step or 0], dict(self.b)[self.step or 0]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between runs A and B."""

    a: RunRecord
    b: RunRecord
    relative: float
    absolute: float
    metrics: tuple[Divergence, ...]  # metrics of both runs; earliest difference first, equal metrics last
    only: tuple[tuple[str, ...], tuple[str, ...]]  # names of metrics that only A has, and that only B has
    config: tuple[tuple[str, Any, Any], ...]  # key, value of A, value of B; ``MISSING`` if a run has no such key

    @property
    def first(self) -> Divergence | None:
        """Return the metric that differs at the earliest step; None if all agree."""
        return next((metric for metric in self.metrics if metric.step is not None), None)


class _Missing:
    def __repr__(self) -> str:
        return "-"


MISSING = _Missing()


def is_time(metric: str) -> bool:
    """Return whether a metric is a time or a throughput, which differs between any two runs.

    A metric without an entry in ``dictionary.ENTRIES`` counts as one if its name begins with ``perf/``.
    """
    entry = next((entry for entry in dictionary.ENTRIES if entry.matches(metric)), None)
    return entry.unit in TIME_UNITS if entry is not None else metric.startswith("perf/")


def compare(a: RunRecord, b: RunRecord, *, relative: float, absolute: float, times: bool = False) -> Comparison:
    """Compare the configurations of both runs, and the metrics of both at their common steps.

    Two values differ if ``|a - b| > absolute + relative * max(|a|, |b|)``; nan and infinities equal themselves only. Metrics
    that are times or throughputs (``is_time``) are compared only with ``times``.
    """
    names_a, names_b = ([name for name in run.metrics if times or not is_time(name)] for run in (a, b))
    set_a, set_b = set(names_a), set(names_b)
    divergences = [_divergence(name, a, b, relative, absolute) for name in names_a if name in set_b]
    divergences.sort(key=lambda item: math.inf if item.step is None else item.step)
    only_names = (tuple(n for n in names_a if n not in set_b), tuple(n for n in names_b if n not in set_a))
    return Comparison(a, b, relative, absolute, tuple(divergences), only_names, config_difference(a.config, b.config))


def config_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Return the dotted keys whose values differ, with both values; ``MISSING`` stands for the value of a missing key."""
    values_a, values_b = flat(a), flat(b)
    keys = [*values_a, *(key for key in values_b if key not in values_a)]
    pairs = ((key, values_a.get(key, MISSING), values_b.get(key, MISSING)) for key in keys)
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def differs(a: float, b: float, relative: float, absolute: float) -> bool:
    """Return whether two values differ by more than the tolerance; nan and infinities equal themselves only."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) > absolute + relative * max(abs(a), abs(b))
    return not (a == b or (math.isnan(a) and math.isnan(b)))


def _divergence(metric: str, a: RunRecord, b: RunRecord, relative: float, absolute: float) -> Divergence:
    values_a, values_b = dict(a.curve(metric)), dict(b.curve(metric))
    steps = [step for step in values_a if step in values_b]
    first = next((step for step in steps if differs(values_a[step], values_b[step], relative, absolute)), None)
    gaps = [abs(values_a[step] - values_b[step]) for step in steps]
    largest = max((gap for gap in gaps if not math.isnan(gap)), default=math.nan)
    return Divergence(metric, tuple(values_a.items()), tuple(values_b.items()), len(steps), first, largest)
