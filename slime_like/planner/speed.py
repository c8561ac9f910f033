"""Time of prefill, and the throughput of an engine that runs as many requests as fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.hardware import Hardware
from slime_like.planner import constants
from slime_like.planner.decode import StepTime, decode_step
from slime_like.planner.engine import engine_memory
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ATTENTION, LATENT, MIXERS, ModelShape


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompt and response length in tokens; if ``uniform``, the maxima of uniformly drawn lengths, as in bench_serving."""

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
        """Mean number of cached tokens of a running request. Long responses weigh more, because they run longer."""
        return self.mean_input + self.output / (3 if self.uniform else 2)

    @property
    def cached_tokens(self) -> float:
        """Tokens of the KV cache to provide per request: the full length, or ``mean_context`` if ``uniform``."""
        return self.mean_context if self.uniform else self.input + self.output


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Seconds that an engine takes to prefill one prompt: ``token`` for each token, plus ``square`` times its squared length."""

    token: float
    square: float

    def seconds(self, tokens: float, squares: float) -> float:
        """Return the seconds to prefill a prompt of ``tokens`` tokens; ``squares`` is the square of ``tokens``.

        If the arguments are means over several prompts, the result is the mean of their seconds.
        """
        return self.token * tokens + self.square * squares


@dataclass(frozen=True, slots=True)
class Throughput:
    """Steady state of an engine under a workload."""

    running: int  # requests that decode together
    step: StepTime
    prefill: float  # seconds per request
    request_seconds: float  # engine time per finished request
    output_tokens: float  # per request

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of the engine."""
        return self.output_tokens / self.request_seconds


def prefill_time(shape: ModelShape, settings: EngineSettings, hardware: Hardware, arrivals: float = 0.0) -> PrefillTime:
    """Return the time of prefill if ``arrivals`` requests arrive per decode step.

    Under data-parallel attention, a group computes the attention of its prompts while the other groups wait, except
    that groups whose prompts arrive in the same step compute together.
    """
    s, gpu = settings, hardware.gpu
    peak = gpu.fp8 if s.weights == "fp8" else gpu.bf16
    prompts = arrivals / -math.expm1(-arrivals) if arrivals else 1.0  # mean prompts of a step that has any
    attention_gpus = s.attention_tp * min(prompts, s.dp_attention)
    mixers = sum(shape.count(mixer) * shape.mixer_parameters(mixer) for mixer in MIXERS)
    pair = 0.0
    if shape.attention is not None:
        pair += 4 * shape.attention.query * shape.count(ATTENTION)
    if shape.latent is not None:
        m = shape.latent
        pair += 2 * m.heads * (m.nope_dim + m.rope_dim + m.value_dim) * shape.count(LATENT)
    token = 2 * (mixers / attention_gpus + (shape.active_parameters - mixers) / s.gpus) / peak
    share = constants.COMPUTE_SHARE.value
    return PrefillTime(token / share, pair / 2 / gpu.bf16 / attention_gpus / share)


def throughput(
    shape: ModelShape, settings: EngineSettings, hardware: Hardware, workload: Workload
) -> Throughput | None:
    """Return the steady state with as many requests as memory and ``settings.max_running`` allow; None if no request fits.

    The engine alternates: it prefills a request in one go, and decodes all running requests together.
    """
    num_fitting = engine_memory(shape, settings, hardware).requests(workload.cached_tokens)
    running = min(num_fitting, settings.max_running or num_fitting)
    if running < 1:
        return None
    step = decode_step(shape, settings, hardware, running, workload.mean_context)
    rates = prefill_time(shape, settings, hardware, running / workload.mean_output)
    prefill = rates.seconds(workload.mean_input, workload.square_input)
    seconds = prefill + workload.mean_output / running * step.total
    return Throughput(running, step, prefill, seconds, workload.mean_output)
