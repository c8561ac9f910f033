"""Host memory of a trainer rank that uses a GPU: offloaded optimizer, copies of weights, and the snapshot of a checkpoint."""

from __future__ import annotations

import math

from slime_like.planner import constants
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import MemoryTable, items
from slime_like.planner.trainer import (
    BUILD,
    GRADIENT_BYTES,
    MAIN_BYTES,
    MOMENT_BYTES,
    PARAMETER_BYTES,
    SCORING,
    RankParameters,
    TensorGroup,
    TrainerSettings,
    num_parameters,
    num_shards,
    stage_parameters,
)


def offload_items(
    shape: ModelShape,
    settings: TrainerSettings,
    num_copies: int = 0,
    *,
    in_rollouts: bool = False,
    stage: int | None = None,
) -> MemoryTable:
    """Return the host memory of a rank of pipeline ``stage`` (None: mean of all stages).

    ``num_copies``: copies of the rank's weights that it keeps in pinned memory. ``in_rollouts``: weights and optimizer state
    move to pinned memory while rollouts are sampled; this memory is not freed afterwards. A rank that only scores has no
    copies, optimizer or snapshot.

    megatron's offload keeps float32 weights, moments and pinned gradients on the host. A save first copies weights, main
    weights and moments from the device to pinned memory, and clones those that are on the host.
    """
    s, block_share = settings, constants.PINNED_BLOCKS.value
    stages = [stage_parameters(shape, s, number) for number in (range(s.pp) if stage is None else (stage,))]
    total = sum(parameters.total for parameters in stages) / len(stages)
    shard = sum(parameters.shard(s) for parameters in stages) / len(stages)
    num_saved = sum(parameters.num_saved(s) for parameters in stages) / len(stages)
    buffers = sum(gradient_buffers(parameters, s) for parameters in stages) / len(stages)
    pinned_share = buffers / (GRADIENT_BYTES * shard)
    weights = PARAMETER_BYTES[s.dtype]
    process = ("processes", constants.HOST_RANK.value, "torch, megatron-core and Ray")
    moved_bytes = block_share * weights * total if in_rollouts else 0.0
    moved_note = "pinned, during rollouts"
    if s.task == SCORING:
        return MemoryTable(items(process, ("offloaded state", moved_bytes, moved_note)))
    state = MOMENT_BYTES + (MAIN_BYTES if s.dtype == "bfloat16" else 0)
    on_host, on_device = shard * s.offload, shard * (1 - s.offload)
    moved_bytes += block_share * state * on_device if in_rollouts else 0.0
    snapshot = num_saved * (pinned_share * (weights + state * (1 - s.offload)) + state * s.offload)
    gradients = pinned_share * GRADIENT_BYTES * on_host
    build = MAIN_BYTES * (total * s.offload + on_host)  # megatron's first optimizer has all parameters of the rank
    return MemoryTable(
        items(
            process,
            ("offloaded optimizer", state * on_host, "float32 weights and moments"),
            ("pinned gradients", gradients, "float32"),
            ("offloaded state", moved_bytes, moved_note),
            (
                "copies of weights",
                block_share * num_copies * weights * total,
                "pinned: reference, teacher, and the weights that they replace",
            ),
            ("checkpoint", snapshot, "snapshot during a save"),
            (BUILD, max(0.0, build - state * on_host - gradients - snapshot), "at the start, above that of a save"),
        )
    )


def gradient_buffers(parameters: RankParameters, settings: TrainerSettings) -> float:
    """Return the bytes of a rank's pinned gradients if its whole shard is offloaded, whatever ``settings.offload`` is.

    Each tensor has a buffer, whose size torch rounds up to a power of two.
    """
    dense_shards, expert_shards = num_shards(settings)
    return _buffers(parameters.dense_tensors, dense_shards) + _buffers(parameters.expert_tensors, expert_shards)


def _buffers(tensors: tuple[TensorGroup, ...], shards: int) -> float:
    """Return the mean bytes of one shard's pinned gradients if these tensors are divided into ``shards`` shards.

    megatron joins the tensors and divides them into equal shards, so a tensor may be cut into parts of any size.
    """
    total, num_bytes = num_parameters(tensors), 0.0
    for tensor in tensors:
        if not tensor.size * tensor.num_tensors:
            continue
        requested = GRADIENT_BYTES * tensor.size
        cut_share = min(1.0, tensor.size * (shards - 1) / total)
        rounded = 2.0 ** math.ceil(math.log2(requested))
        num_bytes += tensor.num_tensors * ((1 - cut_share) * rounded + cut_share * constants.PINNED.value * requested)
    return num_bytes / shards
