"""A checkpoint of any layout goes on in any other, optimizer included: the next two losses are those of the run that saved it."""

from __future__ import annotations

import pytest

from slime_like.config.resolved import Layout
from tests.train.jobs import SP, Job, Results

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "tp2": Layout(**SP),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "vpp2": Layout(pp=2, vpp=2),
}
SOURCES = ("single", *LAYOUTS)
DETERMINISTIC = ("dp2", "pp2")
JOBS = {
    1: [Job("reshard from single", "tests.train.lifecycle:save_then_continue", (Layout(),))],
    2: [
        *(
            Job(f"reshard from {name}", "tests.train.lifecycle:save_then_continue", (layout,))
            for name, layout in LAYOUTS.items()
        ),
        *(
            Job(f"reshard to {name}", "tests.train.lifecycle:resume_from_each", (SOURCES, layout))
            for name, layout in LAYOUTS.items()
        ),
        *(Job(f"same bits {name}", "tests.train.lifecycle:same_bits", (LAYOUTS[name],)) for name in DETERMINISTIC),
    ],
}


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_another_layout_continues_the_run(source: str, target: str, results: Results) -> None:
    (expected,) = [r["losses"] for r in results[f"reshard from {source}"] if r["losses"][0] is not None]
    (found,) = [r[source] for r in results[f"reshard to {target}"] if r[source][0] is not None]
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)  # two steps that differ


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_run_goes_on_with_the_same_bits_on_two_ranks(name: str, results: Results) -> None:
    for rank in results[f"same bits {name}"]:
        assert rank["resumed"] == rank["again"] == rank["whole"]
        assert rank["weights alone"][0] != rank["whole"][0]  # moments, schedule and steps matter
