"""Every loss that reads more than its own token: the same loss and gradient norm in every layout, and the loss is that
of a reference in Python floats. What a sequence has on another context parallel rank counts."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.algorithms import ALGORITHMS
from tests.train.jobs import SP, Job, Results

pytestmark = pytest.mark.ranks

BOUND = 1e-5
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {"tp2 sp": Layout(**SP), "pp2": Layout(pp=2), "dp2": Layout(dp=2), "cp2": Layout(cp=2)},
    4: {"tp2 cp2": Layout(cp=2, **SP)},
}
TARGET = "tests.train.algorithms:every_algorithm"
JOBS = {
    size: [Job(f"algorithms {name}", TARGET, (layout,)) for name, layout in layouts.items()]
    for size, layouts in LAYOUTS.items()
}
JOBS[2].append(Job("algorithms local sums", TARGET, (Layout(cp=2), True)))
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


def reported(results: Results, name: str) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    (found,) = [rank for rank in results[f"algorithms {name}"] if rank[0]]  # exactly one rank reports
    return found


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_loss_and_gradient_do_not_depend_on_the_layout(algo: str, layout: str, results: Results) -> None:
    single, _ = reported(results, "single")
    found, expected = reported(results, layout)
    assert found[algo]["train/loss"] == pytest.approx(expected[algo], rel=BOUND, abs=BOUND)
    assert found[algo]["train/entropy"] > 0, "reported under every loss, also where none reads it"
    for metric, value in single[algo].items():
        if metric.startswith("train/") and "_p99" not in metric:
            assert found[algo][metric] == pytest.approx(value, rel=BOUND, abs=BOUND), metric


@pytest.mark.parametrize("layout", NAMES)
def test_own_loss_and_advantage_train_a_step(layout: str, results: Results) -> None:
    found, expected = reported(results, layout)
    assert found["own"]["train/loss"] == pytest.approx(expected["own"], rel=BOUND, abs=BOUND)
    assert found["own"]["train/reinforce_loss"] == pytest.approx(expected["own"], rel=BOUND, abs=BOUND)
    assert found["own"]["train/grad_norm"] > 0


def test_a_sequence_summed_on_one_context_parallel_rank_only_would_show(results: Results) -> None:
    single, _ = reported(results, "single")
    faulty, _ = reported(results, "local sums")
    wrong = {
        algo
        for algo in ALGORITHMS
        if faulty[algo]["train/grad_norm"] != pytest.approx(single[algo]["train/grad_norm"], rel=100 * BOUND)
    }
    assert wrong == {"gspo", "geometric", "product", "gspo rejection"}


def test_every_bound_is_met_from_both_sides(results: Results) -> None:
    """Otherwise equality would say little."""
    found, _ = reported(results, "single")
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
        assert 0.05 < found[algo][f"train/{metric}"] < 0.95, (algo, found[algo])
    assert found["mis"]["train/mis_maskfrac_low"] > 0.05
    assert len({metrics["train/grad_norm"] for metrics in found.values()}) == len(found)
