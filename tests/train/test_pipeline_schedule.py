"""The planner's micro-batches in flight, compared with megatron's schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.planner.stages import even_sizes, stage_segments
from tests.train.jobs import RankJob, Results, Shared
from tests.train.ranks import RankWorld

pytestmark = pytest.mark.ranks

LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3)]
NUM_MICRO_BATCHES = [1, 2, 4, 5, 16]
# With virtual stages, megatron refuses numbers of micro-batches that pp does not divide, and slime_like pads them.
CASES = [(pp, vpp, count) for pp, vpp in LAYOUTS for count in NUM_MICRO_BATCHES if vpp == 1 or count % pp == 0]
SCHEDULES = "micro-batches in flight"
JOBS = {1: [RankJob(SCHEDULES, "tests.train.test_pipeline_schedule:in_flight")]}


def in_flight(world: RankWorld, shared: Shared) -> dict[tuple[int, int, int, int], list[int]]:
    """Return megatron's [micro-batches of all chunks, most in flight] by (pp, vpp, number of micro-batches, stage)."""
    from megatron.core.pipeline_parallel import schedules

    out: dict[tuple[int, int, int, int], list[int]] = {}
    for pp, vpp, count in CASES:
        for stage in range(pp):
            group = SimpleNamespace(size=lambda n=pp: n, rank=lambda n=stage: n)
            virtual = vpp if vpp > 1 else None
            communicator: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
            total, _, warmup, remaining = schedules.get_pp_rank_microbatches(
                count, vpp, pp, p2p_communicator=communicator
            )
            out[pp, vpp, count, stage] = [total, warmup + (remaining > 0)]
    return out


@pytest.mark.parametrize(("pp", "vpp", "num_micro_batches"), CASES)
def test_micro_batches_in_flight_are_megatrons(pp: int, vpp: int, num_micro_batches: int, results: Results) -> None:
    (schedules,) = results[SCHEDULES]
    for stage in range(pp):
        segments = stage_segments(stage, pp, even_sizes(36, pp * vpp), num_micro_batches)
        expected = [num_micro_batches * vpp, sum(segment.in_flight for segment in segments)]
        assert schedules[pp, vpp, num_micro_batches, stage] == expected
