"""Time of prefill and decode steps, and the throughput of an engine whose KV cache limits its batch."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.planner import constants
from slime_like.planner.engine import WEIGHT_BYTES, engine_memory, token_bytes, weight_items
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.hardware import Hardware
from slime_like.planner.shapes import ATTENTION, LATENT, ModelShape


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests in tokens; if ``uniform``, lengths are uniform up to these (bench_serving's random data)."""

    input: int
    output: int
    uniform: bool = False

    @property
    def mean_input(self) -> float:
        """Mean number of prompt tokens."""
        return self.input / 2 if self.uniform else self.input

    @property
    def mean_output(self) -> float:
        """Mean number of response tokens."""
        return self.output / 2 if self.uniform else self.output

    @property
    def square_input(self) -> float:
        """Mean square of the prompt length."""
        return self.input**2 / (3 if self.uniform else 1)

    @property
    def mean_context(self) -> float:
        """Mean number of tokens in the cache of a running request: longer responses run for longer."""
        return self.mean_input + self.output / (3 if self.uniform else 2)

    @property
    def held_tokens(self) -> float:
        """Tokens of the KV cache to provide per request: the full length, or with uniform lengths the mean."""
        return self.mean_context if self.uniform else self.input + self.output


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decode step of an engine, by cause."""

    weights: float  # reading them, or computing with them if that takes longer
    attention: float
    collectives: float
    exchange: float  # of DCP
    fixed: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.weights + self.attention + self.collectives + self.exchange + self.fixed


@dataclass(frozen=True, slots=True)
class Throughput:
    """Steady state of an engine under a workload."""

    running: int  # requests that decode together
    step: StepTime
    prefill: float  # seconds per request
    request_seconds: float  # of the engine's time, per finished request
    output_tokens: float  # per request

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of the engine."""
        return self.output_tokens / self.request_seconds


def decode_step(
    shape: ModelShape, settings: EngineSettings, hardware: Hardware, requests: float, context: float
) -> StepTime:
    """Return the time of one decode step of ``requests`` requests, with ``context`` cached tokens each."""
    gpu, s = hardware.gpu, settings
    bandwidth = gpu.hbm * constants.BANDWIDTH_SHARE.value
    local = requests / s.dp_attention
    return StepTime(
        weights=max(_weights_read(shape, s, requests) / bandwidth, _linear_seconds(shape, s, hardware, requests)),
        attention=max(
            local * context * token_bytes(shape, s) / bandwidth,
            local * context * _score_flops(shape, s) / (gpu.bf16 * constants.COMPUTE_SHARE.value),
        ),
        collectives=2 * len(shape.layers) * _all_reduce(hardware, s, requests * shape.hidden * 2),
        exchange=_exchange_seconds(shape, s, hardware, local),
        fixed=len(shape.layers) * constants.LAYER_SECONDS.value,
    )


def prefill_seconds(shape: ModelShape, settings: EngineSettings, hardware: Hardware, workload: Workload) -> float:
    """Return the mean time to prefill one request of ``workload``."""
    peak = hardware.gpu.fp8 if settings.weights == "fp8" else hardware.gpu.bf16
    linear = 2 * shape.active_parameters * workload.mean_input / peak
    pairs = workload.square_input / 2
    flops = 0.0
    if shape.attention is not None:
        flops += 4 * shape.attention.query * shape.count(ATTENTION) * pairs
    if shape.latent is not None:
        m = shape.latent
        flops += 2 * m.heads * (m.nope_dim + m.rope_dim + m.value_dim) * shape.count(LATENT) * pairs
    return (linear + flops / hardware.gpu.bf16) / (settings.gpus * constants.COMPUTE_SHARE.value)


def throughput(
    shape: ModelShape,
    settings: EngineSettings,
    hardware: Hardware,
    workload: Workload,
    concurrency: int | None = None,
) -> Throughput | None:
    """Return the steady state with ``concurrency`` clients (None: as many as fit); None if nothing fits.

    The engine alternates: it prefills a request in one go, and decodes all running requests together.
    """
    fit = engine_memory(shape, settings, hardware).requests(workload.held_tokens)
    limits = (fit, settings.max_running or fit, concurrency or fit)
    running = min(limits)
    if running < 1:
        return None
    step = decode_step(shape, settings, hardware, running, workload.mean_context)
    prefill = prefill_seconds(shape, settings, hardware, workload)
    seconds = prefill + workload.mean_output / running * step.total
    return Throughput(running, step, prefill, seconds, workload.mean_output)


def calibrated_gain(base: Throughput, changed: Throughput, tokens_per_second: float) -> float:
    """Return the relative throughput gain of ``changed`` over a ``base`` that was measured at ``tokens_per_second``.

    The measured time per request includes what the model leaves out (scheduling, slow prefill kernels); it is the same
    in both, so that only the modelled difference counts.
    """
    measured_step = base.output_tokens / tokens_per_second
    return measured_step / (measured_step - (base.request_seconds - changed.request_seconds)) - 1


def _weights_read(shape: ModelShape, settings: EngineSettings, tokens: float) -> float:
    """Return the bytes of weights that one rank reads in a step; FlowMLA reads its gathered layers too."""
    plain = EngineSettings(
        gpus=settings.gpus,
        dp_attention=settings.dp_attention,
        dcp=settings.dcp,
        weights=settings.weights,
        replicated_head=settings.replicated_head,
    )
    sizes = {item.name: item.num_bytes for item in weight_items(shape, plain)}
    if shape.experts is not None:
        sizes["experts"] *= 1 - (1 - shape.experts.per_token / shape.experts.count) ** tokens
    if shape.latent is not None:  # a step reads kv_up in one of its two forms
        m = shape.latent
        kv_up = m.kv_rank * m.heads * (m.nope_dim + m.value_dim) / settings.attention_tp
        sizes["attention"] -= WEIGHT_BYTES[settings.weights] * shape.count(LATENT) * kv_up
    if not shape.tied:
        sizes["embedding"] = 0.0
    return sum(sizes.values())


def _linear_seconds(shape: ModelShape, settings: EngineSettings, hardware: Hardware, tokens: float) -> float:
    peak = hardware.gpu.fp8 if settings.weights == "fp8" else hardware.gpu.bf16
    return 2 * shape.active_parameters * tokens / (settings.gpus * peak * constants.COMPUTE_SHARE.value)


def _score_flops(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the FLOPs of one query token per cached token on one rank."""
    if shape.latent is not None:
        m = shape.latent
        return 2 * shape.count(LATENT) * m.heads / settings.attention_tp * (2 * m.kv_rank + m.rope_dim)
    if shape.attention is not None:
        return 4 * shape.count(ATTENTION) * shape.attention.query / settings.attention_tp
    return 0.0


def _all_reduce(hardware: Hardware, settings: EngineSettings, num_bytes: float) -> float:
    """Return the seconds of an all-reduce over the engine's ranks beyond the fixed time of a layer."""
    n = settings.gpus
    if n == 1:
        return 0.0
    nodes = -(-n // hardware.gpus)
    inside = min(n, hardware.gpus)
    seconds = 2 * (inside - 1) / inside * num_bytes / hardware.gpu.link
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * num_bytes / (inside * hardware.gpu.network)
        seconds += constants.NODE_HOP_SECONDS.value
    return seconds


def _exchange_seconds(shape: ModelShape, settings: EngineSettings, hardware: Hardware, requests: float) -> float:
    """Return the seconds in which the ranks exchange queries, log-sum-exp, and float32 partial outputs of all layers."""
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
    return layers * requests * (constants.EXCHANGE_SECONDS.value + (queries + sums + outputs) / hardware.gpu.link)
