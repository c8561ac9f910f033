"""A checkpoint of any layout resumes in any other with the same next two losses, and converts to the same HF model."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.weights import assert_same_tensors

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
    1: [
        RankJob("reshard from single", "tests.train.lifecycle:save_then_continue", (Layout(),)),
        RankJob("reshard to single", "tests.train.lifecycle:resume_from_each", (SOURCES, Layout()), late=True),
        RankJob("export each", "tests.train.starting:export_each", (tuple(LAYOUTS),), late=True),
    ],
    2: [
        *(
            RankJob(f"reshard from {name}", "tests.train.lifecycle:save_then_continue", (layout, "tied", True))
            for name, layout in LAYOUTS.items()
        ),
        *(
            RankJob(f"reshard to {name}", "tests.train.lifecycle:resume_from_each", (SOURCES, layout))
            for name, layout in LAYOUTS.items()
        ),
        *(RankJob(f"same bits {name}", "tests.train.lifecycle:same_bits", (LAYOUTS[name],)) for name in DETERMINISTIC),
    ],
}


@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("source", SOURCES)
def test_another_layout_continues_the_run(source: str, target: str, results: Results) -> None:
    (expected,) = [r["losses"] for r in results[f"reshard from {source}"] if r["losses"][0] is not None]
    (losses,) = [r[source] for r in results[f"reshard to {target}"] if r[source][0] is not None]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)  # so the comparison detects lost state


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_converted_checkpoint_equals_the_export_of_its_ranks(source: str, results: Results, scratch: Path) -> None:
    assert_same_tensors(results["export each"][0][source], scratch / f"reshard_from_{source}" / "hf")


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_run_resumes_bit_for_bit_on_two_ranks(name: str, results: Results) -> None:
    for rank in results[f"same bits {name}"]:
        assert rank["resumed"] == rank["second run"] == rank["first run"]
        assert rank["weights alone"][0] != rank["first run"][0]  # moments and schedule matter
