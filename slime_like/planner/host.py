"""Resident memory of engines and trainer ranks on a CPU, where keys, values and activations live in main memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_like.planner import constants
from slime_like.planner.engine import state_bytes, state_slots, token_bytes, weight_items
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import Item, MemoryTable, items
from slime_like.planner.trainer import TrainerSettings, allocated_items

KV_TOKENS = 65_536  # default max_total_tokens of an engine on a CPU (slime_like_plugins.sglang_cpu.platform)
MEMORY_FRACTION = 0.3  # default mem_fraction_static of such an engine
RUNNING = 512  # default max_running_requests of such an engine with recurrent states (sglang_cpu.hybrid.states)
SLOTS_PER_REQUEST = 4
MAX_STATE_BYTES = 2**30  # SGLang chooses the number of recurrent states if they need more bytes
MAX_PACKED_BYTES = 2**28  # a rank's weights up to this size are packed for C kernels (sglang_cpu.products)


@dataclass(frozen=True, slots=True)
class HostPool:
    """Caches of one engine on a CPU."""

    tokens: int  # tokens of the KV cache: SGLang's max_total_num_tokens
    slots: int  # recurrent states; 0 without recurrence


def host_pool(shape: ModelShape, settings: EngineSettings, available: float, numa_nodes: int = 1) -> HostPool:
    """Return the sizes of the caches of an engine on a CPU. ``available``: bytes of free memory before it loads its weights.

    SGLang gives a rank the static fraction of one NUMA node's share of the free memory. The weights of all ranks reduce
    that share, because they reduce the free memory of the machine. With ``settings.rank_memory``, each rank has its own memory.
    """
    weights, static, max_tokens = rank_weights(shape, settings), settings.static or MEMORY_FRACTION, settings.max_tokens
    if settings.rank_memory is None:
        free_bytes = (available * static - settings.gpus * weights) / numa_nodes
        max_tokens = KV_TOKENS if max_tokens is None else max_tokens
    else:
        free_bytes = settings.rank_memory * static - weights
        max_tokens = 2**31 if max_tokens is None else max_tokens
    slot, slots = state_bytes(shape, settings), 0
    if slot:
        slots = _slots(shape, settings, free_bytes)
        free_bytes -= (slots + 1) * slot
    tokens = settings.dcp * max_tokens
    per_token = token_bytes(shape, settings)
    return HostPool(max(0, min(tokens, int(free_bytes // per_token))) if per_token else tokens, slots)


def host_engine(shape: ModelShape, settings: EngineSettings, pool: HostPool) -> MemoryTable:
    """Return the resident memory of one engine's processes after a batch: the sum of what ``ps`` shows for each process.

    The memory of each process without weights and caches is a measured constant; all other items are computed.
    """
    ranks, weights = settings.gpus, rank_weights(shape, settings)
    states = (pool.slots + 1) * state_bytes(shape, settings) if pool.slots else 0.0
    return MemoryTable(
        (
            *host_processes(settings),
            *items(
                ("weights", ranks * weights, ""),
                ("packed weights", ranks * weights if weights <= MAX_PACKED_BYTES else 0.0, "for the C kernels"),
            ),
            *remote_items(shape, settings),
            *items(
                ("KV cache", ranks * pool.tokens * token_bytes(shape, settings), f"{pool.tokens:,} tokens"),
                ("recurrent states", ranks * states, f"{pool.slots:,} slots"),
            ),
        )
    )


def remote_items(shape: ModelShape, settings: EngineSettings) -> tuple[Item, ...]:
    """Return the host memory of one engine's remote experts: their workers' weights, and the engine's copy of these."""
    weights = rank_weights(shape, replace(settings, remote_experts=0)) - rank_weights(shape, settings)
    return items(
        ("remote experts", settings.gpus * weights * settings.remote_on_host, "in workers"),
        ("copy of remote experts", settings.gpus * weights * settings.remote_copy, "for workers that fail"),
    )


def host_processes(settings: EngineSettings) -> tuple[Item, ...]:
    """Return the memory of an engine's processes without weights and caches."""
    ranks = settings.gpus
    return items(
        ("server", constants.HOST_SERVER.value, "HTTP server"),
        ("detokenizer", constants.HOST_DETOKENIZER.value, ""),
        ("scheduler", ranks * constants.HOST_SCHEDULER.value, f"{ranks} processes" if ranks > 1 else ""),
    )


def rank_weights(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the bytes of one rank's weights."""
    return sum(item.num_bytes for item in weight_items(shape, settings))


def _slots(shape: ModelShape, settings: EngineSettings, free_bytes: float) -> int:
    """Return the number of recurrent states of an attention group.

    It is the CPU platform's default if ``settings.state_slots`` is None and the default fits ``MAX_STATE_BYTES``; otherwise
    the function ``state_slots`` determines it.
    """
    slots = SLOTS_PER_REQUEST * (settings.max_running or RUNNING)
    everywhere = state_bytes(shape, replace(settings, gpus=1, dp_attention=1, dcp=1, weights="float32"))
    if settings.state_slots is None and slots * everywhere <= MAX_STATE_BYTES:
        return slots
    return state_slots(settings, free_bytes, state_bytes(shape, settings))


def host_trainer(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the resident memory of one trainer rank at its peak, in the pipeline stage that needs the most memory.

    The peak is in an optimizer step or while the rank is built; in a rank that only scores, while it scores.
    """
    process = items(("process", constants.HOST_RANK.value, "torch, megatron-core and Ray"))
    allocated = allocated_items(shape, settings)
    return replace(allocated, items=(*process, *allocated.items))
