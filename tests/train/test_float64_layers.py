"""weights.probe_layers: a difference is attributed to the kind of layer that causes it, in every layout."""

from __future__ import annotations

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results

pytestmark = pytest.mark.ranks
KINDS = ("attention", "gdn", "mlp")
CASES = {
    f"exact {model} {fault} on {size}": (size, model, fault)
    for size, model, faults in (
        (1, "qwen3_5", KINDS),
        (2, "qwen3_5", KINDS),
        (1, "qwen3_next experts", ("gdn", "mlp")),
        (2, "qwen3_next experts", ("mlp",)),
    )
    for fault in faults
}
LAYOUTS = {1: Layout(), 2: Layout(**SP)}
JOBS = {
    world_size: [
        RankJob(name, "tests.train.float64_layers:attribute", (model, LAYOUTS[size], fault))
        for name, (size, model, fault) in CASES.items()
        if size == world_size
    ]
    for world_size in LAYOUTS
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_that_rounds_is_found(name: str, results: Results) -> None:
    (errors,) = [result for result in results[name] if result is not None]
    fault = CASES[name][2]
    assert errors[""] > 3e-4, f"the fault has no effect: {errors}"
    assert errors[fault] < 0.03 * errors[""]
    assert errors["all"] < 0.03 * errors[""]
    for kind in set(KINDS) - {fault}:
        assert errors[kind] > 0.5 * errors[""]
