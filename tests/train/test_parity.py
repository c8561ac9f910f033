"""Loss, gradient norm and every gradient equal HF transformers' on the same weights, in every layout.

float32, 4 layers, grouped-query attention, ragged packed rows, tied and untied embeddings, PPO loss with entropy at
temperature 0.7. Three planted faults show that the bound can fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.resolved import Layout
from tests.train.parity import SP, Case, Comparison, Reference, reference
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.ranks

BOUND = 1e-5
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout(), "single plain optimizer": Layout(distributed_optimizer=False)},
    2: {
        "tp2 sp": Layout(**SP),
        "tp2": Layout(tp=2),
        "pp2": Layout(pp=2),
        "dp2": Layout(dp=2),
        "dp2 plain optimizer": Layout(dp=2, distributed_optimizer=False),
    },
    4: {"tp2 pp2": Layout(pp=2, **SP), "tp2 dp2": Layout(dp=2, **SP)},
}
FAULTS = {
    "skipped_tp_reduction": Layout(**SP),
    "shifted_positions": Layout(pp=2),
    "denominator_per_micro_batch": Layout(dp=2),
}
RECOMPUTE = {
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
}


@pytest.fixture(scope="session")
def references(tied_model: Path, untied_model: Path) -> dict[str, tuple[Path, Reference]]:
    return {"tied": (tied_model, reference(tied_model)), "untied": (untied_model, reference(untied_model))}


def cases_of(size: int, references: dict[str, tuple[Path, Reference]]) -> list[Case]:
    cases: list[Case] = [
        (f"{name} {kind}", folder, ref, layout, {}, None)
        for name, layout in LAYOUTS[size].items()
        for kind, (folder, ref) in references.items()
    ]
    folder, ref = references["tied"]
    if size == 2:
        cases += [(fault, folder, ref, layout, {}, fault) for fault, layout in FAULTS.items()]
        cases += [(name, folder, ref, Layout(**SP), {"model": keys}, None) for name, keys in RECOMPUTE.items()]
    return cases


@pytest.fixture(scope="session")
def compared(references: dict[str, tuple[Path, Reference]]) -> dict[str, Any]:
    """Case name -> comparison (of the reporter) or traceback."""
    out: dict[str, Any] = {}
    for size in LAYOUTS:
        for results in run_ranks("tests.train.parity:run_cases", size, cases_of(size, references)):
            out |= {name: result for name, result in results.items() if result is not None}
    return out


NAMES = [f"{name} {kind}" for layouts in LAYOUTS.values() for name in layouts for kind in ("tied", "untied")]


@pytest.mark.parametrize("name", [*NAMES, *RECOMPUTE])
def test_equals_hf(name: str, compared: dict[str, Any]) -> None:
    found = compared[name]
    assert isinstance(found, Comparison), found
    assert found.worst <= BOUND, found
    assert found.score <= BOUND, found


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_exceeds_the_bound(fault: str, compared: dict[str, Any]) -> None:
    found = compared[fault]
    assert isinstance(found, Comparison), found
    assert found.worst > 100 * BOUND, found
