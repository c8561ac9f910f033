"""The planner's estimates, compared with published and traced runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_like.planner import constants, published
from slime_like.planner.constants import CONSTANTS, FITTED
from slime_like.planner.published import H20, H800, QWEN, PublishedRun
from slime_like.planner.traced import traced_peaks

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_predictions_are_within_their_bounds() -> None:
    unmet = [case for case in published.cases() if not abs(case.predicted - case.published) <= case.max_difference]
    assert not unmet
    assert all(case.is_met for case in published.cases())


def test_batch_gains_have_a_bound_of_a_quarter_and_throughput_gains_of_a_third() -> None:
    batches = [case for case in published.cases() if case.quantity == "batch gain"]
    assert len(batches) == 2 and all(case.max_difference == case.published / 4 for case in batches)
    gains = {case.quantity: case for case in published.cases() if case.unit == "%"}
    near_zero = gains.pop("32k/4k, gain at concurrency 32")
    assert (near_zero.published, near_zero.max_difference) == (0.2, 2.0)
    speeds = [case for case in published.cases() if case.quantity == "throughput gain"]
    assert len(gains) == 6 and len(speeds) == 2  # the gains of both FlowMLA cases have one name
    assert all(case.max_difference == pytest.approx(case.published / 3) for case in (*gains.values(), *speeds))


def test_a_prediction_outside_its_bound_is_not_met() -> None:
    case = PublishedRun("case", "gain", published=9.0, predicted=12.1, unit="%", source="", tolerance=1 / 3)
    assert not case.is_met
    assert any("3.0 points: not met" in line for line in published.case_lines([case]))


def test_gain_of_dcp_grows_with_concurrency() -> None:
    gains = [case.predicted for case in published.cases() if case.quantity.startswith("32k/4k, gain")]
    assert len(gains) == 5 and gains == sorted(gains)


def test_long_responses_are_predicted_by_a_fit_to_short_ones() -> None:
    assert not any("32k/8k" in constant.fitted_on for constant in CONSTANTS)
    assert sum(case.quantity.startswith("32k/8k") for case in published.cases()) == 1


def test_at_most_two_constants_are_fitted_and_each_has_a_source() -> None:
    assert len(FITTED) == 2
    assert {id(constant) for constant in CONSTANTS} == {
        id(value) for value in vars(constants).values() if isinstance(value, constants.Constant)
    }
    assert all(constant.source and constant.unit for constant in CONSTANTS)


def test_traced_peaks_are_within_a_tenth() -> None:
    peaks = list(traced_peaks())
    assert peaks
    assert not [run for run in peaks if not abs(run[3] / run[2] - 1) < 0.1]


def test_page_shows_every_case_with_its_prediction() -> None:
    """The table has a row for every predicted case, and no other rows."""
    page = PAGE.read_text()
    head, *tables = "\n".join(published.lines()).split("\n\n")
    for table in (head, *tables):
        columns = table.splitlines()[0]
        published_table = re.search(rf"^{re.escape(columns)}\n(?:\|.*\n)*", page, re.MULTILINE)
        assert published_table is not None and published_table[0].rstrip() == table, (
            "run python -m slime_like.planner.published and copy its tables into docs/planner.md"
        )


def test_no_published_number_is_dropped() -> None:
    numbers = {name: [case.published for case in published.cases() if case.case == name] for name in (H20, H800, QWEN)}
    assert numbers == {
        H20: [52, 0, 136, 136 / 52, 41, 128, 14.16, 22.81, 40.10],
        H800: [22, 30, 83, 83 / 30, 43, 280],
        QWEN: [2, 0.2, 5.6, 9.6, 12, 16, 4_897, 5_679, 24.7, 217.32, 10.18, 10.86],
    }
    assert sum(map(len, numbers.values())) == len(published.cases())
