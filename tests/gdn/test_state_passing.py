"""Context parallelism of Gated DeltaNet by passing states: equal to one rank in values and in every gradient."""

from __future__ import annotations

import pytest

from tests.gdn.state_passing_ranks import Case
from tests.train.ranks import run_ranks

BOUND = 1e-10
SHAPES = (
    (64,),  # one sequence over all ranks
    (5, 3, 40, 1, 17),  # some cut, some whole
    (16, 16, 16, 16),  # borders at sequence ends
    (3,),  # ranges shorter than the convolution's reach
    (150, 70),  # several chunks of the kernel per range
)
CASES = [Case(lengths, gate) for lengths in SHAPES for gate in (4.0, 0.01)]
FAULT = Case((64,), 0.01, kept=True)


@pytest.mark.parametrize("cp", [2, 4])
def test_equals_one_rank(cp: int) -> None:
    found = run_ranks("tests.gdn.state_passing_ranks:errors", cp, cp, [*CASES, FAULT])
    for rank, results in enumerate(found):
        for case, result in zip(CASES, results, strict=False):
            assert max(result.values()) < BOUND, f"rank {rank} of {cp}: {case}: {result}"
    fault = max((results[-1] for results in found), key=lambda result: result["x"])
    assert fault["out"] < BOUND
    assert fault["x"] > 0.05, "a gradient that stops at the border of a rank must show"
