"""Losses that combine tokens: loss and gradient norm are equal in all layouts, and the loss equals a Python reference.

With context parallelism a sequence has tokens on several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.algorithms import ALGORITHMS
from tests.train.jobs import SP, RankJob, Results

pytestmark = pytest.mark.ranks

BOUND = 1e-5
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {"tp2 sp": Layout(**SP), "pp2": Layout(pp=2), "dp2": Layout(dp=2), "cp2": Layout(cp=2)},
    4: {"tp2 cp2": Layout(cp=2, **SP)},
}
TARGET = "tests.train.algorithms:every_algorithm"
JOBS = {
    size: [RankJob(f"algorithms {name}", TARGET, (layout,)) for name, layout in layouts.items()]
    for size, layouts in LAYOUTS.items()
}
JOBS[2].append(RankJob("algorithms local sums", TARGET, (Layout(cp=2), True)))
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


def reporter_metrics(results: Results, name: str) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    (reporter_result,) = [rank for rank in results[f"algorithms {name}"] if rank[0]]  # exactly one rank reports
    return reporter_result


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_loss_and_gradient_do_not_depend_on_the_layout(algo: str, layout: str, results: Results) -> None:
    single, _ = reporter_metrics(results, "single")
    metrics, expected = reporter_metrics(results, layout)
    assert metrics[algo]["train/loss"] == pytest.approx(expected[algo], rel=BOUND, abs=BOUND)
    assert metrics[algo]["train/entropy"] > 0, "entropy is reported for every loss"
    for metric, value in single[algo].items():
        if metric.startswith("train/") and "_p99" not in metric:
            assert metrics[algo][metric] == pytest.approx(value, rel=BOUND, abs=BOUND), metric


@pytest.mark.parametrize("layout", NAMES)
def test_own_loss_and_advantage_train_a_step(layout: str, results: Results) -> None:
    metrics, expected = reporter_metrics(results, layout)
    assert metrics["own"]["train/loss"] == pytest.approx(expected["own"], rel=BOUND, abs=BOUND)
    assert metrics["own"]["train/reinforce_loss"] == pytest.approx(expected["own"], rel=BOUND, abs=BOUND)
    assert metrics["own"]["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            "single",
            "the loss returned means['micro0'] for one micro-batch and means['micro1'] for another of the same step",
        ),
        (
            "dp2",
            "the loss returned means['rank0'] on this rank and different names on another rank: return the same names",
        ),
    ],
)
def test_a_loss_with_other_names_for_another_micro_batch_or_rank_is_refused(
    layout: str, message: str, results: Results
) -> None:
    metrics, _ = reporter_metrics(results, layout)
    (error,) = metrics["names"]
    assert message in error


def test_sums_over_one_context_parallel_rank_are_detected(results: Results) -> None:
    single, _ = reporter_metrics(results, "single")
    faulty, _ = reporter_metrics(results, "local sums")
    wrong = {
        algo
        for algo in ALGORITHMS
        if faulty[algo]["train/grad_norm"] != pytest.approx(single[algo]["train/grad_norm"], rel=100 * BOUND)
    }
    assert wrong == {"gspo", "geometric", "product", "gspo rejection"}


def test_clipping_and_masking_affect_some_tokens(results: Results) -> None:
    """The comparisons above cover both sides of every bound."""
    metrics_of, _ = reporter_metrics(results, "single")
    shares: dict[str, Any] = {
        "gspo": "pg_clipfrac",
        "cispo": "pg_clipfrac",
        "dapo": "pg_clipfrac_lower",
        "tis": "tis_clipfrac",
        "mis": "mis_maskfrac_high",
        "geometric": "rejection_frac",
        "product": "rejection_frac",
        "gspo rejection": "rejection_frac",
    }
    assert set(shares) == set(ALGORITHMS)
    for algo, metric in shares.items():
        assert 0.05 < metrics_of[algo][f"train/{metric}"] < 0.95, (algo, metrics_of[algo])
    assert metrics_of["mis"]["train/mis_maskfrac_low"] > 0.05
    assert len({metrics_of[algo]["train/grad_norm"] for algo in (*ALGORITHMS, "own")}) == len(ALGORITHMS) + 1
