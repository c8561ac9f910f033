"""Imports of a rank that runs many cases on a phantom GPU, kept out of the garbage collector's reach.

Each case collects all garbage several times, so that the memory that it measures has no tensor of an earlier case.
"""

from __future__ import annotations

from slime_like.train.megatron.trace import solo
from tests.train.jobs import import_trainer


def import_rank() -> None:
    """Import the trainer and torch's compiler, which is part of a step on CUDA, and freeze their objects. Idempotent."""
    solo.keep_objects()  # before the collectives are wrapped
    import_trainer("slime_like.train.megatron.trace.unloaded", "torch._inductor.compile_fx", device="cuda")
