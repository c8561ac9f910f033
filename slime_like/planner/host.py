"""Resident memory of engines and trainer ranks on a CPU, where keys, values and activations live in main memory."""

from __future__ import annotations

from dataclasses import replace

from slime_like.planner import constants
from slime_like.planner.engine import state_bytes, token_bytes
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import MemoryTable, items
from slime_like.planner.trainer import TrainerSettings, allocated_items

KV_TOKENS = 65_536  # of an engine on a CPU without max_total_tokens (slime_like_plugins.sglang_cpu.platform)
MEMORY_FRACTION = 0.3  # its mem_fraction_static
STATE_SLOTS = 2_048  # of a hybrid model without max_running_requests: 4 per request, 512 requests
SLOTS_PER_REQUEST = 4
PACKED = 2  # copies of the weights: SGLang's, and those packed for the C kernels


def host_tokens(shape: ModelShape, settings: EngineSettings, available: float, limit: int | None = None) -> int:
    """Return SGLang's max_total_num_tokens of an engine on a CPU with ``available`` bytes of free memory.

    It is the configured ``limit`` for each DCP rank, or what the static fraction holds if that is less.
    """
    chosen = settings.dcp * (KV_TOKENS if limit is None else limit)
    per_token = token_bytes(shape, settings)
    share = available * (settings.static or MEMORY_FRACTION) - shape.parameters * 4 / settings.gpus
    return max(0, min(chosen, int(share // per_token))) if per_token else chosen


def host_slots(settings: EngineSettings) -> int:
    """Return the number of recurrent states of an engine of a hybrid model on a CPU."""
    return STATE_SLOTS if settings.max_running is None else SLOTS_PER_REQUEST * settings.max_running


def host_engine(shape: ModelShape, settings: EngineSettings, tokens: int) -> MemoryTable:
    """Return the resident memory of the processes of one engine, each as ``ps`` shows it."""
    ranks, element, slots = settings.gpus, 4 if settings.weights == "float32" else 2, host_slots(settings)
    return MemoryTable(
        items(
            ("server", constants.HOST_SERVER.value, "HTTP server"),
            ("detokenizer", constants.HOST_DETOKENIZER.value, ""),
            ("scheduler", ranks * constants.HOST_SCHEDULER.value, f"{ranks} processes" if ranks > 1 else ""),
            ("weights", PACKED * element * shape.parameters, "loaded and packed"),
            ("KV cache", ranks * tokens * token_bytes(shape, settings), f"{tokens:,} tokens"),
            ("recurrent states", ranks * slots * state_bytes(shape, settings), f"{slots:,} slots"),
        )
    )


def host_trainer(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the resident memory of one trainer rank at the peak of an optimizer step."""
    process = items(("process", constants.HOST_RANK.value, "torch, megatron-core and Ray"))
    allocated = allocated_items(shape, settings)
    return replace(allocated, items=(*process, *allocated.items))
