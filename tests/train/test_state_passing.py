"""Context parallelism of Gated DeltaNet by state passing: values and gradients equal one rank's in float64.

A model with such layers equals transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import comparison
from tests.train.state_passing import PackedCase
from tests.train.test_hybrid import BOUND, DECAY_BOUND

pytestmark = pytest.mark.ranks

EXACT = 1e-10
SHAPES = (
    (64,),  # one sequence over all ranks
    (5, 3, 40, 1, 17),  # borders cut some of the sequences
    (16, 16, 16, 16),  # borders at sequence ends
    (3,),  # ranges shorter than the convolution's reach
    (150, 70),  # several chunks of the kernel per range
)
STREAMS = [PackedCase(lengths, gate) for lengths in SHAPES for gate in (4.0, 0.01)]
STATE: dict[str, Any] = {"gdn": GDNConfig(cp_mode="state")}
CASES: dict[int, dict[str, tuple[str, Layout, dict[str, Any]]]] = {
    2: {"state cp2": ("qwen3_5", Layout(cp=2), STATE), "state cp2 qwen3_next": ("qwen3_next", Layout(cp=2), STATE)},
    4: {
        "state cp4": ("qwen3_5", Layout(cp=4), STATE),
        "state tp2 cp2 sp": ("qwen3_5", Layout(cp=2, **SP), STATE),
        "auto cp4, two key heads": ("qwen3_5 two key heads", Layout(cp=4), {}),  # mode "head" would need four key heads
    },
}
BOUNDS, MOVED = "bounds of a micro-batch", "what goes to a range"
RANKS = "tests.train.state_passing"
JOBS = {
    size: [
        RankJob(f"stream over {size} ranks", f"{RANKS}:errors", (STREAMS,)),
        *([RankJob(BOUNDS, f"{RANKS}:kept_bounds"), RankJob(MOVED, f"{RANKS}:moves_hidden")] if size == 2 else []),
        *(RankJob(name, "tests.train.parity:compare", (*case, None)) for name, case in cases.items()),
    ]
    for size, cases in CASES.items()
}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_equals_hf(name: str, results: Results) -> None:
    errors = comparison(results, name)
    assert errors.worst <= BOUND, errors
    assert errors.score <= BOUND, errors
    assert errors.decay <= DECAY_BOUND, errors


@pytest.mark.parametrize("cp", CASES)
def test_equals_one_rank(cp: int, results: Results) -> None:
    errors_of_ranks = results[f"stream over {cp} ranks"]
    assert len(errors_of_ranks) == cp and all(len(errors) == len(STREAMS) for errors in errors_of_ranks)
    for rank, errors in enumerate(errors_of_ranks):
        for case, result in zip(STREAMS, errors, strict=True):
            assert max(result.values()) < EXACT, f"rank {rank} of {cp}: {case}: {result}"


def test_bounds_are_made_once_per_micro_batch(results: Results) -> None:
    for count_1, count_2, count_3, count_4 in results[BOUNDS]:  # the third layer is in the second micro-batch
        assert 0 < count_1 == count_2 < count_3 == count_4


def test_the_narrower_of_hidden_states_and_projections_moves(results: Results) -> None:
    assert results[MOVED] == [[True, False, False]] * 2
