"""Warning about a growing difference between trainer and engine."""

from __future__ import annotations

import math

from slime_like.metrics.drift import MEAN_DIFFERENCE, DriftWatch


def warning_steps(*means: float, factor: float | None = 2.0) -> list[int]:
    """Return the indices of rollouts with a warning, given the mean difference of each."""
    watch = DriftWatch(rounding=0.02, ceiling=0.15, factor=factor)
    return [index for index, mean in enumerate(means) if watch.warnings({MEAN_DIFFERENCE: mean})]


def test_rounding_is_not_warned_of() -> None:
    assert warning_steps(0.001, 0.019, 0.001, 0.01) == []  # above the median, but within rounding
    assert warning_steps(0.05, 0.06, 0.09, 0.05) == []  # a model with larger rounding


def test_a_drift_is_warned_of_at_its_start_and_at_each_doubling() -> None:
    assert warning_steps(0.01, 0.011, 0.012, 0.03, 0.04, 0.059, 0.07, 0.01, 0.05) == [3, 6, 8]
    assert warning_steps(0.01, 2.0, 2.5, 2.2) == [1]  # directly after the first push
    assert warning_steps(0.01, math.nan) == [1]
    assert warning_steps(0.05, math.nan, 0.05, 0.12) == [1, 3]


def test_the_first_rollout_is_compared_with_the_ceiling() -> None:
    assert warning_steps(0.14) == [] and warning_steps(0.16) == [0]


def test_the_warning_names_both_numbers_and_can_be_turned_off() -> None:
    watch = DriftWatch(rounding=0.02, ceiling=0.15, factor=2.0)
    assert watch.warnings({MEAN_DIFFERENCE: 0.015}) == []
    (line,) = watch.warnings({MEAN_DIFFERENCE: 0.08})
    assert (
        f"{MEAN_DIFFERENCE} is 0.08, the median of earlier rollouts is 0.015" in line
        and "weights.drift_warning" in line
    )
    assert warning_steps(0.01, 5.0, factor=None) == []


def test_the_warning_says_which_limit_was_exceeded() -> None:
    watch = DriftWatch(rounding=0.02, ceiling=0.15, factor=2.0)
    (first,) = watch.warnings({MEAN_DIFFERENCE: 0.16})
    assert "is not within 0.15 (weights.probe_tolerance)" in first and "grows" not in first
    (repeated,) = watch.warnings({MEAN_DIFFERENCE: 0.33})
    assert "grows (weights.drift_warning=2)" in repeated and "probe_tolerance" not in repeated
    watch = DriftWatch(rounding=0.02, ceiling=0.15, factor=2.0)
    assert watch.warnings({MEAN_DIFFERENCE: 0.1}) == []
    (large,) = watch.warnings({MEAN_DIFFERENCE: 0.16})
    assert (
        "the median of earlier rollouts is 0.1:" in large
        and "weights.probe_tolerance" in large
        and "grows" not in large
    )


def test_mixed_samples_are_compared_with_samples_of_one_version() -> None:
    watch = DriftWatch(rounding=0.02, ceiling=0.15, factor=2.0)
    assert watch.warnings({MEAN_DIFFERENCE: 0.015, f"{MEAN_DIFFERENCE}_mixed": 0.015}) == []
    (line,) = watch.warnings({MEAN_DIFFERENCE: 0.015, f"{MEAN_DIFFERENCE}_mixed": 0.5})
    assert line.startswith(f"{MEAN_DIFFERENCE}_mixed is 0.5")
    assert watch.warnings({"train/off_policy_token_ratio": 1.0}) == []  # nothing was compared
