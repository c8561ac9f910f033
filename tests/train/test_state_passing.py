"""Context parallelism of Gated DeltaNet by passing states: equal to one rank in values and in every gradient (float64).

And in a whole model equal to transformers, as the layers that give every rank a share of the heads are.
"""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, Job, Results
from tests.train.parity import comparison
from tests.train.state_passing import Case
from tests.train.test_hybrid import BOUND, DECAY_BOUND

pytestmark = pytest.mark.ranks

EXACT = 1e-10
SHAPES = (
    (64,),  # one sequence over all ranks
    (5, 3, 40, 1, 17),  # some cut, some whole
    (16, 16, 16, 16),  # borders at sequence ends
    (3,),  # ranges shorter than the convolution's reach
    (150, 70),  # several chunks of the kernel per range
)
STREAMS = [Case(lengths, gate) for lengths in SHAPES for gate in (4.0, 0.01)]
STATE: dict[str, Any] = {"gdn": GDNConfig(cp_mode="state")}
CASES: dict[int, dict[str, tuple[str, Layout, dict[str, Any]]]] = {
    2: {"state cp2": ("qwen3_5", Layout(cp=2), STATE), "state cp2 qwen3_next": ("qwen3_next", Layout(cp=2), STATE)},
    4: {
        "state cp4": ("qwen3_5", Layout(cp=4), STATE),
        "state tp2 cp2 sp": ("qwen3_5", Layout(cp=2, **SP), STATE),
        "auto cp4, two key heads": ("qwen3_5 two key heads", Layout(cp=4), {}),  # which have to be four for head-wise
    },
}
BOUNDS, MOVED = "bounds of a micro-batch", "what goes to a range"
RANKS = "tests.train.state_passing"
JOBS = {
    size: [
        Job(f"stream over {size} ranks", f"{RANKS}:errors", (STREAMS,)),
        *([Job(BOUNDS, f"{RANKS}:kept_bounds"), Job(MOVED, f"{RANKS}:moved")] if size == 2 else []),
        *(Job(name, "tests.train.parity:compare", (*case, None)) for name, case in cases.items()),
    ]
    for size, cases in CASES.items()
}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_equals_hf(name: str, results: Results) -> None:
    found = comparison(results, name)
    assert found.worst <= BOUND, found
    assert found.score <= BOUND, found
    assert found.decay <= DECAY_BOUND, found


@pytest.mark.parametrize("cp", CASES)
def test_equals_one_rank(cp: int, results: Results) -> None:
    found = results[f"stream over {cp} ranks"]
    assert len(found) == cp and all(len(errors) == len(STREAMS) for errors in found)
    for rank, errors in enumerate(found):
        for case, result in zip(STREAMS, errors, strict=True):
            assert max(result.values()) < EXACT, f"rank {rank} of {cp}: {case}: {result}"


def test_bounds_are_made_once_per_micro_batch(results: Results) -> None:
    for first, second, other, last in results[BOUNDS]:
        assert 0 < first == second < other == last


def test_the_narrower_of_hidden_states_and_projections_moves(results: Results) -> None:
    assert results[MOVED] == [[True, False, False]] * 2
