"""Memory of one rank of an SGLang engine, and the KV cache that it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.errors import ConfigError
from slime_like.planner import constants
from slime_like.planner.hardware import Hardware
from slime_like.planner.shapes import ATTENTION, LATENT, RECURRENT, ModelShape, latent_parts
from slime_like.planner.table import Item, MemoryTable, items

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Bytes per weight of the linear layers. Embedding, output layer, router and norms of an FP8 model stay bfloat16."""
FLOW_PARTS = {"output": ("output",), "all": ("output", "query_up", "kv_up", "down")}
"""Value of ``flow_mla`` -> projections of latent attention that FlowMLA shards over the data-parallel attention ranks."""
STATE_SHARE = 0.9 / 1.9  # of a hybrid model's pool: SGLang's mamba_full_memory_ratio 0.9, states to keys and values
STATE_BYTES = 4  # SGLang keeps recurrent states in float32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine: ``gpus`` tensor parallel ranks that serve together."""

    gpus: int = 1
    dp_attention: int = 1  # ranks hold different sequences; attention is tensor parallel over gpus / dp_attention
    dcp: int = 1  # ranks that share the tokens of a sequence
    flow_mla: str = "none"  # none, or a key of FLOW_PARTS
    weights: str = "bfloat16"
    kv_bytes: int = 2  # per element
    static: float | None = None  # SGLang's mem_fraction_static; None: SGLang's default
    tuned: bool = False  # static was raised until the engine no longer started
    chunk: int = 8_192  # tokens of a prefill chunk
    graph_requests: int | None = None  # of the largest CUDA graph; None: SGLang's default
    replicated_head: bool = False  # SGLang's enable_dp_lm_head
    max_running: int | None = None  # SGLang's max_running_requests
    states_per_request: int = 5  # recurrent states counted for each; 3 with no_buffer, 1 without radix cache
    max_tokens: int | None = None  # SGLang's max_total_tokens: KV capacity of an attention group, per DCP rank

    @property
    def attention_tp(self) -> int:
        """Ranks over which a sequence's attention heads are split."""
        return self.gpus // self.dp_attention


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one engine rank on a GPU."""

    table: MemoryTable  # with the pool
    pool: float  # bytes for keys and values; negative if the engine does not start
    token_bytes: float  # of one token of a sequence, on one rank
    slot_bytes: float  # recurrent state of one request, on one rank
    state_requests: int  # requests of one group whose recurrent states fit
    groups: int  # independent attention groups, each with its own pool

    @property
    def tokens(self) -> int:
        """KV capacity of the engine in tokens: SGLang's max_total_num_tokens, summed over data-parallel attention."""
        return self.group_tokens * self.groups

    @property
    def group_tokens(self) -> int:
        """KV capacity of one attention group in tokens."""
        return max(0, int(self.pool // self.token_bytes)) if self.token_bytes else 2**31

    def requests(self, tokens_per_request: float) -> int:
        """Return the number of requests of this length that the engine holds at once."""
        fit = int(self.group_tokens // max(1.0, tokens_per_request))
        return self.groups * (min(fit, self.state_requests) if self.slot_bytes else fit)


def check_engine(shape: ModelShape, settings: EngineSettings) -> None:
    """Raise ``ConfigError`` on sizes that do not divide one another or that the model does not support."""
    s = settings
    if s.gpus % s.dp_attention:
        raise ConfigError(
            f"--dp-attention {s.dp_attention} does not divide the engine's {s.gpus} GPUs (--tp): set a divisor of {s.gpus}"
        )
    if s.attention_tp % s.dcp:
        raise ConfigError(
            f"--dcp {s.dcp} does not divide the {s.attention_tp} ranks of an attention group (--tp / --dp-attention): "
            f"set a divisor of {s.attention_tp}"
        )
    if shape.heads % s.attention_tp:
        raise ConfigError(
            f"--tp {s.gpus} / --dp-attention {s.dp_attention} = {s.attention_tp} does not divide the {shape.heads} attention "
            f"heads of {shape.name}: set --tp to a divisor"
        )
    if s.flow_mla != "none" and (shape.latent is None or s.dp_attention == 1):
        raise ConfigError(
            f"--flow-mla {s.flow_mla} shards the latent attention of data-parallel attention ranks, but {shape.name} has "
            f"{'no latent attention' if shape.latent is None else '--dp-attention 1'}: use --flow-mla none"
        )


def useful_dcp(shape: ModelShape, settings: EngineSettings) -> int:
    """Return the largest DCP size that adds KV capacity: ranks of an attention group / KV heads."""
    return max(1, settings.attention_tp // shape.kv_heads) if shape.count(RECURRENT) < len(shape.layers) else 1


def token_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the KV bytes that one token of a sequence takes on one rank of its attention group."""
    if shape.attention is not None:
        heads = max(1.0, shape.attention.kv_heads * settings.dcp / settings.attention_tp)
        per_layer = 2 * shape.attention.head_dim * math.ceil(heads)
        return shape.count(ATTENTION) * per_layer * settings.kv_bytes / settings.dcp
    if shape.latent is not None:
        return shape.count(LATENT) * (shape.latent.kv_rank + shape.latent.rope_dim) * settings.kv_bytes / settings.dcp
    return 0.0


def state_bytes(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the bytes of one request's recurrent state on one rank."""
    if shape.recurrence is None:
        return 0.0
    r, element = shape.recurrence, WEIGHT_BYTES["float32"] if settings.weights == "float32" else 2
    state = r.value_heads * r.key_dim * r.value_dim * STATE_BYTES
    window = r.channels * (r.conv_width - 1) * element
    return shape.count(RECURRENT) * (state + window) / settings.attention_tp


def weight_items(shape: ModelShape, settings: EngineSettings) -> tuple[Item, ...]:
    """Return the weights of one engine rank."""
    s = settings
    linear = WEIGHT_BYTES[s.weights]
    wide = max(linear, 2)
    whole = s.gpus if s.dp_attention == 1 else 1  # SGLang replicates the embedding under data-parallel attention
    head = 1 if s.replicated_head else s.gpus
    dense_layers = len(shape.layers) - shape.sparse_layers
    mlp = dense_layers * shape.dense_parameters + shape.sparse_layers * shape.shared_parameters
    small = shape.sparse_layers * shape.router_parameters + (2 * len(shape.layers) + 1) * shape.hidden
    attention = linear * _attention_weights(shape, s)
    saved = linear * flow_saving(shape, s)
    slots = linear * _flow_slots(shape, s)
    return items(
        ("attention", attention - saved - slots, f"tensor parallel over {s.attention_tp}"),
        ("FlowMLA slots", slots, "two gathered layers"),
        ("experts", linear * shape.routed_parameters / s.gpus, f"over {s.gpus} ranks"),
        ("MLP", linear * mlp / s.gpus, "dense layers and shared experts" if shape.experts else ""),
        ("router and norms", wide * small, "replicated"),
        ("embedding", wide * shape.embedding_parameters / whole, "replicated" if whole == 1 < s.gpus else ""),
        ("output layer", 0 if shape.tied else wide * shape.embedding_parameters / head, ""),
    )


def flow_saving(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the weights per rank that FlowMLA removes: ``W (1 - 1/dp)`` less two slots of ``W / layers * (dp - 1) / dp``."""
    if settings.flow_mla == "none":
        return 0.0
    return _flow_weights(shape, settings) * (1 - 1 / settings.dp_attention) - _flow_slots(shape, settings)


def _flow_weights(shape: ModelShape, settings: EngineSettings) -> float:
    assert shape.latent is not None, "check_engine refuses other models"
    parts = latent_parts(shape.hidden, shape.latent)
    chosen = sum(parts[name] for name in FLOW_PARTS[settings.flow_mla])
    return shape.count(LATENT) * chosen / settings.attention_tp


def _flow_slots(shape: ModelShape, settings: EngineSettings) -> float:
    if settings.flow_mla == "none":
        return 0.0
    dp = settings.dp_attention
    return 2 * _flow_weights(shape, settings) / shape.count(LATENT) * (dp - 1) / dp


def _attention_weights(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the parameters of all token mixers on one rank, without FlowMLA."""
    tp, total = settings.attention_tp, 0.0
    if shape.attention is not None:
        a = shape.attention
        heads = math.ceil(max(1.0, a.kv_heads * settings.dcp / tp))
        keys = 2 * shape.hidden * heads * a.head_dim
        queries = shape.hidden * a.query * (3 if a.gated else 2) / tp
        total += shape.count(ATTENTION) * (queries + keys)
    if shape.latent is not None:
        parts = latent_parts(shape.hidden, shape.latent)
        split = parts["query_up"] + parts["output"] + 2 * parts["kv_up"]  # SGLang also keeps kv_up in absorbed form
        total += shape.count(LATENT) * (parts["down"] + split / tp)
    if shape.recurrence is not None:
        total += shape.count(RECURRENT) * shape.mixer_parameters(RECURRENT) / tp
    return total


def static_fraction(settings: EngineSettings, hardware: Hardware) -> float:
    """Return SGLang's mem_fraction_static: the configured one, or SGLang 0.5.23's default for this GPU."""
    if settings.static is not None:
        return settings.static
    memory = hardware.gpu.memory
    graphs = constants.SGLANG_GRAPH.value * _graph_requests(settings, hardware)
    if settings.dp_attention > 1:
        graphs += graphs * settings.dp_attention * 1.5  # three more MiB per request and attention group
    reserve = (
        constants.SGLANG_META.value
        + constants.SGLANG_PREFILL.value * max(settings.chunk, 2_048)
        + constants.SGLANG_PARALLEL.value * settings.gpus
        + graphs
    )
    if memory > 60 * constants.GIB:
        reserve = max(reserve, constants.SGLANG_LEAST.value)
    return round((memory - reserve) / memory, 3)


def _graph_requests(settings: EngineSettings, hardware: Hardware) -> int:
    if settings.graph_requests is not None:
        return settings.graph_requests
    memory = hardware.gpu.memory / constants.GIB
    small, large = (8, 8) if memory < 20 else (48, 160) if memory < 35 else (32, 160) if memory < 60 else (256, 512)
    default = small if settings.gpus < 4 else large
    return default if settings.max_running is None else min(default, settings.max_running)


def runtime_items(shape: ModelShape, settings: EngineSettings, hardware: Hardware) -> tuple[Item, ...]:
    """Return the memory outside the static fraction that an engine rank uses: context, buffers, graphs, activations."""
    s = settings
    width = max(
        2 * shape.dense_width / s.gpus,
        2 * shape.hidden,
        0 if shape.experts is None else shape.experts.per_token * (shape.hidden + 2 * shape.experts.width / s.gpus),
    )
    activations = 2 * s.chunk * (3 * shape.hidden + 1.5 * width)
    logits = 3 * 4 * _graph_requests(s, hardware) * shape.vocabulary  # float32, of the largest batch, and two copies
    return items(
        ("CUDA context", constants.CUDA_CONTEXT.value, ""),
        ("communicators", constants.NCCL_BUFFERS.value * (s.gpus > 1), "NCCL"),
        ("CUDA graphs", constants.SGLANG_GRAPH.value * _graph_requests(s, hardware), ""),
        ("prefill", activations, f"activations of {s.chunk} tokens"),
        ("logits", logits, ""),
    )


def engine_memory(shape: ModelShape, settings: EngineSettings, hardware: Hardware) -> EngineMemory:
    """Return the memory of one engine rank on a GPU of ``hardware``. Raises ``ConfigError`` on an impossible layout."""
    check_engine(shape, settings)
    weights = weight_items(shape, settings)
    num_weights = sum(item.num_bytes for item in weights)
    memory, s = hardware.gpu.memory, settings
    runtime = runtime_items(shape, s, hardware)
    fixed = sum(item.num_bytes for item in runtime if item.name in ("CUDA context", "communicators"))
    if s.tuned:
        reserve = constants.LEAST_RESERVE.value + constants.SGLANG_PARALLEL.value * s.gpus
        pool = memory - reserve - num_weights
        runtime = items(("reserve", reserve, "context, graphs and activations of a tuned engine"))
    else:
        pool = (memory - fixed) * static_fraction(s, hardware) - num_weights
    slot, slots = state_bytes(shape, s), 0
    states = pool * STATE_SHARE if slot and pool > 0 else 0.0
    if slot:
        slots = int(states // slot)
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
