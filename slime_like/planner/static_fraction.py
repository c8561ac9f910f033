"""SGLang's default mem_fraction_static: the share of a GPU for weights and KV cache, from an estimate of all other memory.

The computation follows ``handle_gpu_memory_settings`` of SGLang 0.5.23 (arg_groups/memory_hook.py) for a text model that
prefills and decodes on NVIDIA GPUs. Sizing after graph capture is not modelled: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is off
by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.hardware import GpuKind
from slime_like.planner import constants
from slime_like.planner.constants import GIB
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ModelShape

LARGE_GPU = 60 * GIB  # on larger GPUs, SGLang has a minimum reserve
LARGE_GRAPH = 300  # requests; for larger graphs, data-parallel attention takes more per request
LATENT_GRAPH_TOKENS = 8_192  # tokens of the largest prefill graph of latent attention
DEEPEP_GRAPH_TOKENS = 2_048  # tokens of the largest prefill graph with DeepEP; its graphs have multiples of 8 tokens
MIN_PREFILL_TOKENS = 2_048


@dataclass(frozen=True, slots=True)
class GpuDefaults:
    """SGLang's defaults for GPUs with less memory than ``below``."""

    below: float  # bytes
    chunk: int  # tokens of a prefill chunk
    requests: int  # requests of the largest CUDA graph of decoding
    wide_requests: int  # the same with 4 or more tensor parallel ranks


GPU_DEFAULTS = (
    GpuDefaults(20 * GIB, 2_048, 8, 8),
    GpuDefaults(35 * GIB, 4_096, 48, 160),
    GpuDefaults(60 * GIB, 4_096, 32, 160),
    GpuDefaults(160 * GIB, 8_192, 256, 512),
    GpuDefaults(float("inf"), 16_384, 512, 512),
)


def static_fraction(shape: ModelShape, settings: EngineSettings, gpu: GpuKind) -> float:
    """Return SGLang's mem_fraction_static: the configured one, or its default for this model and GPU."""
    if settings.static is not None:
        return settings.static
    reserve = (
        constants.SGLANG_META.value
        + constants.SGLANG_PREFILL.value * max(prefill_tokens(settings, gpu), MIN_PREFILL_TOKENS)
        + constants.SGLANG_PARALLEL.value * settings.gpus
        + graph_bytes(shape, settings, gpu)
    )
    if gpu.memory > LARGE_GPU:
        reserve = max(reserve, constants.SGLANG_LEAST.value)
    if settings.deepep and settings.decode_graphs:
        reserve += constants.SGLANG_DEEPEP_DECODE.value
    return round((gpu.memory - reserve) / gpu.memory, 3)


def prefill_tokens(settings: EngineSettings, gpu: GpuKind) -> int:
    """Return the number of tokens of the largest prefill batch, before data-parallel attention divides them."""
    chunk = _chunk(settings, gpu)
    return chunk if chunk > 0 else settings.max_prefill_tokens


def graph_requests(settings: EngineSettings, gpu: GpuKind) -> int:
    """Return the size, in requests, of the largest CUDA graph of decoding.

    Even without CUDA graphs, this size determines the padding that SGLang reserves for data-parallel attention.
    """
    if settings.graph_requests is not None:
        return settings.graph_requests
    defaults = _defaults(gpu)
    requests = defaults.requests if settings.gpus < 4 else defaults.wide_requests
    return requests if settings.max_running is None else min(requests, settings.max_running)


def graph_bytes(shape: ModelShape, settings: EngineSettings, gpu: GpuKind) -> float:
    """Return the bytes that SGLang reserves for CUDA graphs and for the padding of data-parallel attention."""
    requests = graph_requests(settings, gpu)
    total = constants.SGLANG_GRAPH.value * requests if settings.decode_graphs else 0.0
    if settings.dp_attention > 1:
        padded_requests = requests * settings.dp_attention
        total += constants.SGLANG_PADDING.value * padded_requests
        total += constants.SGLANG_LARGE_PADDING.value * padded_requests * (requests > LARGE_GRAPH)
    graphs = prefill_graphs(shape, settings, gpu)
    if graphs is not None:
        latent = shape.latent is not None
        total += constants.SGLANG_LATENT_GRAPHS.value if latent else constants.SGLANG_PREFILL_GRAPH.value * graphs
        total += constants.SGLANG_DEEPEP_PREFILL.value * settings.deepep
    return total


def prefill_graphs(shape: ModelShape, settings: EngineSettings, gpu: GpuKind) -> int | None:
    """Return the number of prefill CUDA graphs; None if they are turned off.

    By default, decode context parallelism turns them off. The default number is 0 if prefill has no chunks, except with DeepEP.
    """
    if settings.prefill_graphs is not None:
        return settings.prefill_graphs or None
    if settings.dcp > 1:
        return None
    if settings.deepep:
        return len({-(-size // 8) for size in graph_sizes(DEEPEP_GRAPH_TOKENS)})
    largest = _chunk(settings, gpu)
    if shape.latent is not None:
        largest = min(largest, LATENT_GRAPH_TOKENS)
    if settings.max_tokens is not None:
        largest = min(largest, settings.max_tokens)
    return len(graph_sizes(largest))


def graph_sizes(largest: int) -> list[int]:
    """Return the sizes of the prefill graphs in tokens, up to ``largest``.

    They are those of SGLang's generate_prefill_cuda_graph_batch_sizes.
    """
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1_024, 64), (1_280, 4_096, 256), (4_608, largest, 512))
    return [size for first, last, step in steps for size in range(first, last + 1, step) if size <= largest]


def _chunk(settings: EngineSettings, gpu: GpuKind) -> int:
    return _defaults(gpu).chunk if settings.chunk is None else settings.chunk


def _defaults(gpu: GpuKind) -> GpuDefaults:
    return next(defaults for defaults in GPU_DEFAULTS if gpu.memory < defaults.below)
