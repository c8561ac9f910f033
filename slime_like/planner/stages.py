"""Pipeline stages of a trainer: their layers, and the micro-batches whose activations they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageSegment:
    """Consecutive layers of one stage. A stage has several segments if there are virtual stages."""

    first: int  # index of the first layer
    num_layers: int
    in_flight: int  # micro-batches whose activations are kept at the stage's peak


def stage_segments(
    stage: int, pp: int, sizes: Sequence[int], num_micro_batches: int | None = None
) -> tuple[StageSegment, ...]:
    """Return the segments of a stage. ``sizes``: number of layers of each of the pp * vpp segments.

    A stage keeps the activations of all forward passes up to its first backward pass: ``pp - stage`` passes under 1F1B; under
    the interleaved schedule ``2 * (pp - stage - 1) + (vpp - 1) * pp + 1`` passes of single segments, in groups of pp
    micro-batches (megatron-core, pipeline_parallel/schedules.py). A segment keeps at most ``num_micro_batches``, the number of
    micro-batches in an optimizer step (None: enough to fill the pipeline).
    """
    vpp = len(sizes) // pp
    passes = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    if num_micro_batches is not None:
        passes = min(passes, num_micro_batches * vpp)
    group = pp if num_micro_batches is None else min(pp, num_micro_batches)
    counts = [0] * vpp
    for index in range(passes):
        counts[index // group % vpp] += 1
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        StageSegment(starts[v * pp + stage], sizes[v * pp + stage], in_flight) for v, in_flight in enumerate(counts)
    )


def even_sizes(num_layers: int, num_segments: int) -> tuple[int, ...]:
    """Return the number of layers of each of ``num_segments`` segments in an even split.

    The first segments have one more if there is a remainder.
    """
    base, extra = divmod(num_layers, num_segments)
    return tuple(base + (i < extra) for i in range(num_segments))
