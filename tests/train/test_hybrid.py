"""Qwen3.5 and Qwen3-Next without experts: loss, every gradient and log-probabilities equal transformers', in every layout.

float32, four blocks of which one is gated attention and three are Gated DeltaNet with grouped value heads, partial
rotary, ragged packed rows. transformers' own delta rule ignores the borders of packed sequences: it gets one at a time.
"""

from __future__ import annotations

import pytest

from slime_like.config.resolved import Layout
from tests.train.jobs import SP, Job, Results
from tests.train.parity import Comparison

pytestmark = pytest.mark.ranks

BOUND = 1e-5
DECAY_BOUND = 3e-4  # transformers in float32 is as far from itself in float64
KINDS = ("qwen3_5", "qwen3_next")
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {
        "tp2 sp": Layout(**SP),
        "tp2": Layout(tp=2),
        "pp2": Layout(pp=2),
        "dp2": Layout(dp=2),
        "cp2": Layout(cp=2),
    },
    4: {"tp2 cp2": Layout(tp=2, cp=2), "tp2 cp2 sp": Layout(cp=2, **SP)},
}
CASES = {
    size: {f"{kind} {name}": (kind, layout) for name, layout in layouts.items() for kind in KINDS}
    for size, layouts in LAYOUTS.items()
}
JOBS = {
    size: [Job(name, "tests.train.parity:compare", (*case, {}, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
NAMES = [name for cases in CASES.values() for name in cases]


def comparison(results: Results, name: str) -> Comparison:
    (found,) = [result for result in results[name] if result is not None]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    found = comparison(results, name)
    assert found.worst <= BOUND, found
    assert found.score <= BOUND, found
    assert found.decay <= DECAY_BOUND, found
