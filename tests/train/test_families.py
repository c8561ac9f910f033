"""Llama and Qwen2: loss, gradients and log-probabilities equal transformers', and an export equals the loaded weights.

Models: Llama untied with llama3 rotary scaling, Llama tied without it, and Qwen2 tied, which has biases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import assert_equals_hf, comparison
from tests.train.weights import assert_refused, assert_same_tensors, assert_shards_merge, family_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
KINDS = {"llama": "llama", "llama tied": "llama", "qwen2": "qwen2"}
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {"tp2 sp": Layout(**SP), "pp2": Layout(pp=2)},
}
CASES = {
    size: {f"{kind} {name}": (kind, layout) for name, layout in layouts.items() for kind in KINDS}
    for size, layouts in LAYOUTS.items()
}
ROUND_TRIP = {f"round trip {name}": case for name, case in CASES[2].items()}
JOBS = {
    size: [RankJob(name, "tests.train.parity:compare", (*case, {}, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
JOBS[2] += [RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()]
FAULT = "biases in the wrong order"
JOBS[2] += [RankJob(FAULT, "tests.train.parity:compare", ("qwen2", Layout(pp=2), {}, "shuffled_biases"))]
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    assert_equals_hf(comparison(results, name), BOUND)


def test_an_injected_fault_exceeds_the_bound(results: Results) -> None:
    errors = comparison(results, FAULT)
    assert errors.score > 100 * BOUND, errors


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_loaded_weights_are_exported_bit_for_bit(name: str, models: dict[str, Path], results: Results) -> None:
    assert_same_tensors(results[name][0], models[ROUND_TRIP[name][0]])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_merge_to_the_hf_tensors(models: dict[str, Path], kind: str, tp: int) -> None:
    assert_shards_merge(family_of(models[kind], KINDS[kind], tp), models[kind], tp)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias=True of a llama model is not supported: .* only False"),
        ("llama", {"attention_bias": True}, "attention_bias=True of a llama model"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True of a qwen2 model"),
    ],
)
def test_an_unsupported_variant_is_refused(
    models: dict[str, Path], kind: str, change: dict[str, Any], message: str
) -> None:
    assert_refused(models[kind], KINDS[kind], 1, change, message)
