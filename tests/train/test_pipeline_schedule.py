"""The planner's micro-batches in flight, compared with megatron's schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules

from slime_like.planner.stages import even_sizes, stage_segments


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 5, 16])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
def test_micro_batches_in_flight_are_megatrons(pp: int, vpp: int, num_micro_batches: int) -> None:
    if vpp > 1 and num_micro_batches % pp:
        return  # megatron refuses it, and slime_like pads it
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        communicator: Any = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
        )
        total, _, warmup, remaining = schedules.get_pp_rank_microbatches(
            num_micro_batches, vpp, pp, p2p_communicator=communicator
        )
        segments = stage_segments(stage, pp, even_sizes(36, pp * vpp), num_micro_batches)
        assert total == num_micro_batches * vpp
        assert sum(segment.in_flight for segment in segments) == warmup + (remaining > 0)
