"""The planner's micro-batches in flight, compared with megatron's schedules."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from slime_like.planner.stages import even_sizes, stage_segments

pytestmark = pytest.mark.slow

LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3)]
NUM_MICRO_BATCHES = [1, 2, 4, 5, 16]
# In a process of its own, because importing megatron here would change torch's loading for all later tests.
PROGRAM = """
import json, sys
from types import SimpleNamespace
from megatron.core.pipeline_parallel import schedules

layouts, counts = json.loads(sys.argv[1])
out = {}
for pp, vpp in layouts:
    for count in counts:
        if vpp > 1 and count % pp:
            continue  # megatron refuses it, and slime_like pads it
        for stage in range(pp):
            group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
            virtual = vpp if vpp > 1 else None
            communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
            total, _, warmup, remaining = schedules.get_pp_rank_microbatches(count, vpp, pp, p2p_communicator=communicator)
            out[f"{pp} {vpp} {count} {stage}"] = total, warmup + (remaining > 0)
print(json.dumps(out))
"""


@functools.cache
def schedules() -> dict[str, list[int]]:
    """Return megatron's (micro-batches of all chunks, most in flight) by ``pp vpp num_micro_batches stage``."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([LAYOUTS, NUM_MICRO_BATCHES])]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_micro_batches", NUM_MICRO_BATCHES)
@pytest.mark.parametrize(("pp", "vpp"), LAYOUTS)
def test_micro_batches_in_flight_are_megatrons(pp: int, vpp: int, num_micro_batches: int) -> None:
    if vpp > 1 and num_micro_batches % pp:
        return
    for stage in range(pp):
        segments = stage_segments(stage, pp, even_sizes(36, pp * vpp), num_micro_batches)
        in_flight = sum(segment.in_flight for segment in segments)
        assert [num_micro_batches * vpp, in_flight] == schedules()[f"{pp} {vpp} {num_micro_batches} {stage}"]
