"""Memory of one rank of an SGLang engine, and the KV cache that fits in the remaining memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.hardware import Hardware
from slime_like.planner import constants
from slime_like.planner.engine_settings import EngineSettings, check_engine
from slime_like.planner.flow_mla import check_flow_mla, flow_saving, flow_slots
from slime_like.planner.shapes import ATTENTION, LATENT, RECURRENT, ModelShape, latent_parts
from slime_like.planner.static_fraction import graph_bytes, graph_requests, prefill_tokens, static_fraction
from slime_like.planner.table import Item, MemoryTable, items

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Bytes per weight of the linear layers. Embedding, output layer, router and norms of an FP8 model stay bfloat16."""
# Share of recurrent states in a hybrid model's pool. SGLang's mamba_full_memory_ratio, states / KV cache, is 0.9.
STATE_SHARE = 0.9 / 1.9
STATE_BYTES = 4  # SGLang keeps recurrent states in float32
ENGINE_REMAINDER = ("CUDA context", "communicators", "symmetric memory", "attention workspace")
"""Items that stay on the device after an engine has released its weights, caches and CUDA graphs."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one engine rank on a GPU. For an engine on a CPU, ``table`` is the memory of all processes of the engine."""

    table: MemoryTable  # including the caches
    pool: float  # bytes for keys and values; negative if the engine does not start
    token_bytes: float  # bytes for one token of a sequence, on one rank
    slot_bytes: float  # recurrent state of one request, on one rank
    state_requests: int  # requests of one group whose recurrent states fit
    groups: int  # independent attention groups, each with its own pool

    @property
    def tokens(self) -> int:
        """KV capacity of the engine in tokens: SGLang's max_total_num_tokens, summed over the attention groups."""
        return self.group_tokens * self.groups

    @property
    def group_tokens(self) -> int:
        """KV capacity of one attention group in tokens; 2**31 for a model without a KV cache."""
        return max(0, int(self.pool // self.token_bytes)) if self.token_bytes else 2**31

    def requests(self, tokens_per_request: float) -> int:
        """Return the number of requests of ``tokens_per_request`` tokens that the engine holds at the same time."""
        num_requests = int(self.group_tokens // max(1.0, tokens_per_request))
        return self.groups * (min(num_requests, self.state_requests) if self.slot_bytes else num_requests)


def useful_dcp(shape: ModelShape, settings: EngineSettings) -> int:
    """Return the largest size of decode context parallelism that adds KV capacity.

    It is the number of ranks of an attention group divided by the number of KV heads, rounded down, but at least 1. For a model
    without a KV cache it is 1.
    """
    return max(1, settings.attention_tp // shape.kv_heads) if shape.count(RECURRENT) < len(shape.layers) else 1


def token_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the KV bytes that one token of a sequence takes on one rank of its attention group, on average.

    Return 0 for a model without a KV cache.
    """
    if shape.attention is not None:
        heads = max(1.0, shape.attention.kv_heads * settings.dcp / settings.attention_tp)
        per_layer = 2 * shape.attention.head_dim * math.ceil(heads)
        return shape.count(ATTENTION) * per_layer * settings.kv_bytes / settings.dcp
    if shape.latent is not None:
        return shape.count(LATENT) * (shape.latent.kv_rank + shape.latent.rope_dim) * settings.kv_bytes / settings.dcp
    return 0.0


def state_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the bytes of one request's recurrent state on one rank; 0 for a model without recurrence."""
    if shape.recurrence is None:
        return 0.0
    r, element = shape.recurrence, WEIGHT_BYTES["float32"] if settings.weights == "float32" else 2
    state = r.value_heads * r.key_dim * r.value_dim * STATE_BYTES
    window = r.channels * (r.conv_width - 1) * element
    return shape.count(RECURRENT) * (state + window) / settings.attention_tp


def state_slots(settings: EngineSettings, pool: float, slot: float) -> int:
    """Return the number of recurrent states of an attention group, without the one for padding requests.

    If max_mamba_cache_size is set, the result is the group's part of it. Otherwise, if max_running_requests is set and there is
    no radix cache, the result is the group's part of max_running_requests, but at least 1. In all other cases it is the number of
    states of ``slot`` bytes that fit in the share of ``pool`` that SGLang gives to states (``STATE_SHARE``).
    """
    s = settings
    if s.state_slots is not None:
        return s.state_slots // s.dp_attention
    if s.states_per_request == 1 and s.max_running is not None:  # without radix cache
        return max(1, s.max_running // s.dp_attention)
    return max(0, int(pool * STATE_SHARE // slot) - 1)


WEIGHT_ITEMS = ("attention", "FlowMLA slots", "experts", "MLP", "router and norms", "embedding", "output layer")
"""Names of the items of ``weight_items``."""


def weight_items(shape: ModelShape, settings: EngineSettings) -> tuple[Item, ...]:
    """Return the memory of one engine rank's weights, one item per kind. ``WEIGHT_ITEMS`` lists the items' names."""
    s = settings
    linear = WEIGHT_BYTES[s.weights]
    wide = max(linear, 2)
    shards = s.gpus if s.dp_attention == 1 else 1  # SGLang replicates the embedding under data-parallel attention
    head = 1 if s.replicated_head else s.gpus
    dense_layers = len(shape.layers) - shape.sparse_layers
    mlp = dense_layers * shape.dense_parameters + shape.sparse_layers * shape.shared_parameters
    small_weights = shape.sparse_layers * shape.router_parameters + (2 * len(shape.layers) + 1) * shape.hidden
    attention = linear * _attention_weights(shape, s)
    saved_bytes = linear * flow_saving(shape, s)
    slots = linear * flow_slots(shape, s)
    return items(
        ("attention", attention - saved_bytes - slots, f"tensor parallel over {s.attention_tp}"),
        ("FlowMLA slots", slots, "gathered layers"),
        ("experts", linear * shape.routed_parameters * _local_share(shape, s) / s.gpus, f"over {s.gpus} ranks"),
        ("MLP", linear * mlp / s.gpus, "dense layers and shared experts" if shape.experts else ""),
        ("router and norms", wide * small_weights, "replicated"),
        ("embedding", wide * shape.embedding_parameters / shards, "replicated" if shards == 1 < s.gpus else ""),
        ("output layer", 0 if shape.tied else wide * shape.embedding_parameters / head, ""),
    )


def _local_share(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the share of the routed experts that is in the engine's memory, not in that of workers for remote experts."""
    return 1.0 if shape.experts is None else 1.0 - settings.remote_experts / shape.experts.num_experts


def _attention_weights(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the number of weights of all token mixers on one rank, including copies, without FlowMLA."""
    tp, total = settings.attention_tp, 0.0
    if shape.attention is not None:
        a = shape.attention
        heads = math.ceil(max(1.0, a.kv_heads * settings.dcp / tp))
        keys = 2 * shape.hidden * heads * a.head_dim
        queries = shape.hidden * a.query * (3 if a.gated else 2) / tp
        copies = shape.hidden * a.query * settings.dcp / tp if settings.replicated_q else 0
        total += shape.count(ATTENTION) * (queries + keys + copies)
    if shape.latent is not None:
        parts = latent_parts(shape.hidden, shape.latent)
        split = parts["query_up"] + parts["output"] + 2 * parts["kv_up"]  # SGLang also keeps kv_up in absorbed form
        total += shape.count(LATENT) * (parts["down"] + split / tp)
    if shape.recurrence is not None:
        total += shape.count(RECURRENT) * shape.mixer_parameters(RECURRENT) / tp
    return total


def runtime_items(shape: ModelShape, settings: EngineSettings, hardware: Hardware) -> tuple[Item, ...]:
    """Return the items of an engine rank's memory outside SGLang's static fraction: context, buffers, graphs, activations."""
    s = settings
    width = max(
        2 * shape.dense_width / s.gpus,
        2 * shape.hidden,
        0 if shape.experts is None else shape.experts.per_token * (shape.hidden + 2 * shape.experts.width / s.gpus),
    )
    tokens = prefill_tokens(s, hardware.gpu) // s.dp_attention
    activations = 2 * tokens * (3 * shape.hidden + 1.5 * width)
    requests = graph_requests(s, hardware.gpu) if s.decode_graphs else 0
    logits = 3 * 4 * requests * shape.vocabulary  # float32 logits of the largest graph, and two copies
    return items(
        ("CUDA context", constants.CUDA_CONTEXT.value, ""),
        ("communicators", constants.NCCL_BUFFERS.value * (s.gpus > 1), "NCCL"),
        ("symmetric memory", constants.SYMMETRIC_MEMORY.value * (s.symmetric_memory and s.gpus > 1), "NCCL, reserved"),
        ("attention workspace", constants.FLASHINFER_WORKSPACE.value * s.workspaces, "FlashInfer"),
        ("CUDA graphs", graph_bytes(shape, s, hardware.gpu), ""),
        ("prefill", activations, f"activations of {tokens} tokens"),
        ("logits", logits, ""),
    )


def _reserve_items(runtime: tuple[Item, ...], reserve: float) -> tuple[Item, ...]:
    """Divide the ``reserve`` of an engine with ``tuned`` settings into items, and return them.

    ``reserve`` is the number of bytes that such an engine uses for neither weights nor caches. The items are those of
    ``runtime`` that stay on the device when the engine releases its memory, and one for the rest.
    """
    remainder = tuple(item for item in runtime if item.name in ENGINE_REMAINDER)
    num_reserve_bytes = reserve - sum(item.num_bytes for item in remainder)
    return (*remainder, Item("reserve", num_reserve_bytes, "for CUDA graphs, activations and buffers"))


def engine_memory(shape: ModelShape, settings: EngineSettings, hardware: Hardware) -> EngineMemory:
    """Return the memory of one engine rank on a GPU of ``hardware``.

    Raises ``ConfigError`` if the layout is impossible. Weights that do not fit give a negative ``pool``.
    """
    check_engine(shape, settings)
    check_flow_mla(shape, settings)
    weights = weight_items(shape, settings)
    num_weights = sum(item.num_bytes for item in weights)
    memory, s = hardware.gpu.memory, settings
    runtime = runtime_items(shape, s, hardware)
    fixed_bytes = sum(item.num_bytes for item in runtime if item.name in ("CUDA context", "communicators"))
    if s.tuned:
        reserve = constants.LEAST_RESERVE.value + constants.SGLANG_PARALLEL.value * s.gpus
        pool = memory - reserve - num_weights
        runtime = _reserve_items(runtime, reserve)
    else:
        pool = (memory - fixed_bytes) * static_fraction(shape, s, hardware.gpu) - num_weights
    slot, slots, states = state_bytes(shape, s), 0, 0.0
    if slot and pool > 0:
        slots = state_slots(s, pool, slot)
        states = (slots + 1) * slot
    per_token, cache = token_bytes(shape, s), pool - states
    if s.max_tokens is not None:
        cache = min(cache, s.max_tokens * s.dcp * per_token)
    pools = items(("recurrent states", states, f"{slots} slots"), ("KV cache", max(0.0, cache), ""))
    return EngineMemory(
        table=MemoryTable((*weights, *runtime, *pools)),
        pool=cache,
        token_bytes=per_token,
        slot_bytes=slot,
        state_requests=slots // s.states_per_request,
        groups=s.dp_attention,
    )
