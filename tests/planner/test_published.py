"""The planner's estimates, compared with published and traced runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.planner import published
from slime_like.planner.constants import CONSTANTS, FITTED
from slime_like.planner.published import PublishedRun

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
CASES = published.cases()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.tolerance is not None], ids=lambda case: f"{case.name}: {case.quantity}"
)
def test_prediction_is_within_its_tolerance(case: PublishedRun) -> None:
    assert case.tolerance is not None
    assert abs(case.predicted - case.published) <= case.tolerance * case.published


def test_batch_gains_have_a_tolerance_of_a_quarter_and_throughput_gains_of_a_third() -> None:
    tolerances = {case.quantity: case.tolerance for case in CASES if case.tolerance is not None}
    assert [tolerances[name] for name in tolerances if name == "batch gain"] == [0.25]
    gains = [case.tolerance for case in CASES if case.unit == "%" and case.tolerance is not None]
    assert len(gains) == 5 and set(gains) == {1 / 3}


def test_gain_of_dcp_grows_with_concurrency_until_the_cache_is_full() -> None:
    gains = [case.predicted for case in CASES if case.quantity.startswith("32k/4k, gain")]
    assert gains == sorted(gains) and abs(gains[0]) < 4 and gains[-1] > 10


def test_long_responses_are_predicted_by_a_fit_to_short_ones() -> None:
    assert not any("32k/8k" in constant.fitted_on for constant in CONSTANTS)
    long = next(case for case in CASES if case.quantity.startswith("32k/8k"))
    assert abs(long.predicted - 24.7) < 24.7 / 3


def test_at_most_two_constants_are_fitted_and_each_has_a_source() -> None:
    assert len(FITTED) == 2
    assert all(constant.source and constant.unit for constant in CONSTANTS)


@pytest.mark.parametrize("index", range(len(list(published.traced_peaks()))))
def test_traced_peak_is_within_a_tenth(index: int) -> None:
    model, settings, peak, predicted = list(published.traced_peaks())[index]
    assert abs(predicted / peak - 1) < 0.1, (model, settings)


def test_page_shows_every_case_with_its_prediction() -> None:
    page = PAGE.read_text()
    missing = [line for line in published.lines() if line and line not in page]
    assert not missing, "run python -m slime_like.planner.published and copy its tables into docs/planner.md"
