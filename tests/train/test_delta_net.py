"""A Gated DeltaNet layer on many ranks equals the recurrence, token by token in float64: output and every gradient.

Cases: tensor parallelism with and without sequence parallelism, both modes of context parallelism on two and four
ranks, numbers of key heads that the ranks do not divide, fast decays and slow decays.
"""

from __future__ import annotations

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.delta_net import LayerCase
from tests.train.jobs import SP, RankJob, Results

pytestmark = pytest.mark.ranks

BOUND = 1e-10
DECAYS = (2.0, 0.01)
LAYOUTS: dict[int, dict[str, tuple[Layout, str]]] = {
    2: {
        "tp2": (Layout(tp=2), "head"),
        "tp2 sp": (Layout(**SP), "head"),
        "cp2": (Layout(cp=2), "head"),
        "cp2 state": (Layout(cp=2), "state"),
    },
    4: {
        "cp4": (Layout(cp=4), "head"),
        "cp4 state": (Layout(cp=4), "state"),
        "tp2 cp2 sp": (Layout(cp=2, **SP), "head"),
        "tp2 cp2 state": (Layout(tp=2, cp=2), "state"),
    },
}
CASES = {
    size: [LayerCase(layout, mode, decay) for layout, mode in layouts.values() for decay in DECAYS]
    for size, layouts in LAYOUTS.items()
}
CASES[4] += [
    LayerCase(layout, "auto", 0.01, key_heads=2) for layout in (Layout(cp=4), Layout(cp=2, **SP))
]  # indivisible
FAULTS = {
    "out_norm.weight": LayerCase(Layout(tp=2), fault="unsummed_head_norm"),
    "out": LayerCase(Layout(cp=2), fault="unordered_ranks"),
    "hidden": LayerCase(Layout(cp=2), "state", 0.01, fault="gradient_of_own_range"),
}
JOBS = {
    size: [
        RankJob(
            f"delta net {size}", "tests.train.delta_net:errors", (cases + (list(FAULTS.values()) if size == 2 else []),)
        )
    ]
    for size, cases in CASES.items()
}


@pytest.mark.parametrize("size", LAYOUTS)
def test_equals_the_recurrence(size: int, results: Results) -> None:
    errors_of_ranks = results[f"delta net {size}"]
    assert len(errors_of_ranks) == size
    for rank, errors in enumerate(errors_of_ranks):
        for case, parts in zip(CASES[size], errors, strict=False):
            assert {"out", "hidden", "A_log", "dt_bias", "conv1d.weight", "out_norm.weight"} < parts.keys()
            assert max(parts.values()) <= BOUND, f"rank {rank} of {size}: {case}: {parts}"


@pytest.mark.parametrize("part", FAULTS)
def test_an_injected_fault_is_detected(part: str, results: Results) -> None:
    case = len(CASES[2]) + list(FAULTS).index(part)
    assert max(rank[case][part] for rank in results["delta net 2"]) > 0.01


def test_a_gradient_that_stops_at_a_ranks_border_does_not_change_the_output(results: Results) -> None:
    case = len(CASES[2]) + list(FAULTS).index("hidden")
    parts = [rank[case] for rank in results["delta net 2"]]
    assert max(p["out"] for p in parts) <= BOUND and max(p["hidden"] for p in parts) > 0.05, parts
