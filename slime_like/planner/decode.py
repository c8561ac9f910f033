"""Time of a decode step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_like.hardware import GpuKind, Hardware
from slime_like.planner import constants
from slime_like.planner.engine import WEIGHT_BYTES, token_bytes, weight_items
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.flow_mla import flow_weights
from slime_like.planner.kernels import EXCHANGE, num_kernels
from slime_like.planner.links import all_gather_seconds, all_reduce_seconds
from slime_like.planner.shapes import ATTENTION, LATENT, ModelShape
from slime_like.planner.static_fraction import graph_requests


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decode step of an engine, by cause."""

    weights: float  # reading them or, if slower, computing with them; and the outputs of experts
    attention: float
    collectives: float
    exchange: float  # exchange between DCP ranks
    fixed: float  # fixed time of all kernels
    prefetch: float  # the larger of FlowMLA's memory traffic and the part of its all-gathers that nothing hides

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.weights + self.attention + self.collectives + self.exchange + self.fixed + self.prefetch


def decode_step(
    shape: ModelShape, settings: EngineSettings, hardware: Hardware, requests: float, context: float
) -> StepTime:
    """Return the time of one decode step of ``requests`` requests, with ``context`` cached tokens each."""
    gpu, s = hardware.gpu, settings
    rows = _group_rows(s, gpu, requests)
    weights = _weight_seconds(shape, s, gpu, requests, rows)
    attention = _attention_seconds(shape, s, gpu, requests / s.dp_attention, context, rows)
    exchange = _exchange_seconds(shape, s, hardware, requests / s.dp_attention)
    kernels = num_kernels(shape, fp8=s.weights == "fp8") * constants.KERNEL_SECONDS.value
    return StepTime(
        weights=weights,
        attention=attention,
        collectives=2 * len(shape.layers) * all_reduce_seconds(hardware, s.gpus, requests * shape.hidden * 2),
        exchange=exchange,
        fixed=kernels,
        prefetch=_prefetch_seconds(shape, s, hardware, weights + attention + kernels),
    )


def _bandwidth(gpu: GpuKind) -> float:
    return gpu.hbm * constants.BANDWIDTH_SHARE.value


def _flops(gpu: GpuKind, weights: str) -> float:
    return (gpu.fp8 if weights == "fp8" else gpu.bf16) * constants.COMPUTE_SHARE.value


def _group_rows(settings: EngineSettings, gpu: GpuKind, requests: float) -> float:
    """Return the number of requests that each attention group computes, including padding."""
    if settings.padded_groups and requests <= graph_requests(settings, gpu):
        return requests
    return requests / settings.dp_attention


def _weight_seconds(shape: ModelShape, settings: EngineSettings, gpu: GpuKind, requests: float, rows: float) -> float:
    """Return the seconds that a decode step takes for a rank's weights.

    ``requests``: number of requests of the engine. ``rows``: number that each attention group computes, as from ``_group_rows``.
    Each kind of weight takes the time to read it or, if that is longer, the time to compute with it. The result is the sum over
    all kinds, plus the time to write and sum the outputs of the experts.
    """
    linear, seconds = WEIGHT_BYTES[settings.weights], 0.0
    tokens = {"attention": rows, "output layer": requests / (settings.dp_attention if settings.replicated_head else 1)}
    for item in weight_items(shape, replace(settings, flow_mla=())):
        num_bytes, flops = item.num_bytes, 0.0
        if item.name == "embedding" and not shape.tied:
            continue
        if item.name == "experts" and shape.experts is not None:
            share = shape.experts.per_token / shape.experts.num_experts
            flops = 2 * num_bytes / linear * share * requests
            num_bytes *= 1 - (1 - share) ** requests
        else:
            if item.name == "attention" and shape.latent is not None:  # a step reads kv_up in one of its two forms
                m = shape.latent
                kv_up = m.kv_rank * m.heads * (m.nope_dim + m.value_dim) / settings.attention_tp
                num_bytes -= linear * shape.count(LATENT) * kv_up
            element = linear if item.name in ("attention", "MLP") else max(linear, 2)
            flops = 2 * num_bytes / element * tokens.get(item.name, requests)
        seconds += max(num_bytes / _bandwidth(gpu), flops / _flops(gpu, settings.weights))
    if shape.experts is not None:  # each token has an output of each of its experts, written once and read once
        outputs = 2 * shape.sparse_layers * shape.experts.per_token * shape.hidden * 2
        seconds += requests * outputs / _bandwidth(gpu)
    return seconds


def _attention_seconds(
    shape: ModelShape, settings: EngineSettings, gpu: GpuKind, requests: float, context: float, rows: float
) -> float:
    """Return the seconds to read the cache of a rank's ``requests`` or, if slower, to compute attention.

    ``rows`` is the number of requests including padding, as ``_group_rows`` returns it; only latent attention takes time for
    padding.
    """
    tile = constants.LATENT_TILE.value
    peak = gpu.bf16 * constants.COMPUTE_SHARE.value
    if shape.latent is not None:
        m = shape.latent
        tokens = requests * context + (rows - requests) * tile  # a padding row attends to one tile
        heads = max(tile, m.heads * settings.dcp / settings.attention_tp)
        flops = 2 * shape.count(LATENT) * heads * (2 * m.kv_rank + m.rope_dim) / settings.dcp
        return tokens * max(token_bytes(shape, settings) / _bandwidth(gpu), flops / peak)
    if shape.attention is None:
        return 0.0
    heads = max(1.0, shape.attention.kv_heads * settings.dcp / settings.attention_tp)
    waves = requests * heads / (constants.ATTENTION_BLOCKS.value * gpu.sms)
    occupancy = 1 - waves / 2 if waves < 1 else waves / (waves + 1)
    flops = 4 * shape.count(ATTENTION) * shape.attention.query / settings.attention_tp
    return requests * context * max(token_bytes(shape, settings) / _bandwidth(gpu) / occupancy, flops / peak)


def _exchange_seconds(shape: ModelShape, settings: EngineSettings, hardware: Hardware, requests: float) -> float:
    """Return the seconds to exchange queries, log-sum-exp and float32 partial outputs of all layers between DCP ranks.

    ``requests`` is the number of requests of one attention group, without padding.
    """
    c = settings.dcp
    if c == 1:
        return 0.0
    if shape.latent is not None:
        layers, width = shape.count(LATENT), shape.latent.kv_rank + shape.latent.rope_dim
    else:
        layers, width = shape.count(ATTENTION), 0 if shape.attention is None else shape.attention.head_dim
    heads = shape.heads / settings.attention_tp
    queries = heads * (c - 1) * width * 2
    sums = heads * c * (c - 1) * 4
    outputs = 2 * (c - 1) * heads * width * 4
    links = (queries + sums + outputs) / (hardware.gpu.link * constants.LINK_SHARE.value)
    return layers * (EXCHANGE * constants.KERNEL_SECONDS.value + requests * (constants.EXCHANGE_SECONDS.value + links))


def _prefetch_seconds(shape: ModelShape, settings: EngineSettings, hardware: Hardware, other_seconds: float) -> float:
    """Return the seconds that FlowMLA adds to a step.

    ``other_seconds`` is the time of the step's other work, which hides the all-gathers of weights. It includes neither the
    all-reduces nor the DCP exchange, which share the links with FlowMLA. A gathered layer is written to memory once, and read
    once for the next rank.
    """
    if not settings.flow_mla:
        return 0.0
    dp = settings.dp_attention
    weights = WEIGHT_BYTES[settings.weights] * flow_weights(shape, settings)
    traffic = 2 * weights * (dp - 1) / dp / _bandwidth(hardware.gpu)
    return max(traffic, all_gather_seconds(hardware, dp, weights) - other_seconds)
