"""Published runs, each with the planner's prediction.

``python -m slime_like.planner.published`` prints three tables of docs/planner.md: published runs, traced peaks and constants.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime_like.hardware import parse_hardware
from slime_like.planner.benchmark import random_lengths, simulate
from slime_like.planner.constants import CONSTANTS
from slime_like.planner.decode import decode_step
from slime_like.planner.engine import engine_memory
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.models import find_shape
from slime_like.planner.speed import Throughput, Workload, prefill_time, throughput
from slime_like.planner.traced import traced_peaks
from slime_like.planner.trainer import TrainerSettings
from slime_like.printable import print_output

FLOW_SOURCE = "SGLang pull request #7005 and its article"
DCP_SOURCE = "SGLang pull request #14982"
LATENT_SOURCE = "SGLang pull request #5001"
H20, H800, QWEN = "DeepSeek-R1 FP8, 8xH20", "DeepSeek-R1 BF16, 32xH800", "Qwen3-235B BF16, 8xH20"
THIRD, QUARTER, POINTS = 1 / 3, 1 / 4, 2.0
REQUESTS_PER_CLIENT = 10  # reproduces the token totals of pull request #14982's run with one client


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published number with the prediction for it."""

    case: str
    quantity: str
    published: float
    predicted: float
    unit: str
    source: str
    tolerance: float  # relative tolerance
    points: float = 0.0  # absolute tolerance, for a number close to 0, in its unit

    @property
    def max_difference(self) -> float:
        """Largest accepted difference between the prediction and the published number."""
        return max(self.tolerance * self.published, self.points)

    @property
    def is_met(self) -> bool:
        """True if the prediction is at most ``max_difference`` off."""
        return abs(self.predicted - self.published) <= self.max_difference


@functools.cache
def cases() -> tuple[PublishedRun, ...]:
    """Return every published case with its prediction."""
    return (*_flow_h20(), *_flow_h800(), *_latent_batches(), *_dcp())


def _steady(machine: str, settings: EngineSettings) -> Throughput:
    hardware = parse_hardware("--on", machine)
    steady = throughput(find_shape("MODEL", "DeepSeek-R1"), settings, hardware, Workload(1_024, 2_048))
    assert steady is not None, f"DeepSeek-R1 fits {machine}"
    return steady


def _spread(engine: EngineSettings) -> EngineSettings:
    """Return ``engine`` with data-parallel attention as in SGLang of June 2025, and the highest possible static fraction.

    The largest CUDA graph of that SGLang had 160 requests.
    """
    return replace(
        engine, dp_attention=engine.gpus, replicated_head=True, padded_groups=True, graph_requests=160, tuned=True
    )


def _flow_h20() -> Iterator[PublishedRun]:
    tensor = EngineSettings(8, weights="fp8", tuned=True)
    plain = _spread(tensor)
    base, variant = (_steady("8xH20", s) for s in (tensor, replace(plain, flow_mla=("o_proj",))))
    memory = engine_memory(find_shape("MODEL", "DeepSeek-R1"), plain, parse_hardware("--on", "8xH20"))
    for quantity, published_batch, predicted, tolerance in (
        ("batch, TP (fitted)", 52, base.running, 0.02),
        ("batch, DP attention (out of memory)", 0, memory.requests(3_072), 0.0),
        ("batch, FlowMLA", 136, variant.running, QUARTER),
    ):
        yield PublishedRun(H20, quantity, published_batch, predicted, "requests", FLOW_SOURCE, tolerance)
    yield from _gains(H20, 8, base, variant, batch=136 / 52, gain=41, speed=128)


def _flow_h800() -> Iterator[PublishedRun]:
    plain, shape = _spread(EngineSettings(32)), find_shape("MODEL", "DeepSeek-R1")
    base, variant = (_steady("4x8xH800", s) for s in (plain, replace(plain, flow_mla=("o_proj",))))
    # The article counts each projection once; an engine also keeps kv_up in its absorbed form.
    attention = 2 * shape.count("latent") * shape.mixer_parameters("latent") / 1e9
    yield PublishedRun(H800, "attention weights per GPU", 22, attention, "GB", FLOW_SOURCE, 0.05)
    for quantity, published_batch, steady in (("DP attention", 30, base), ("FlowMLA", 83, variant)):
        quantity = f"batch per GPU, {quantity}"
        yield PublishedRun(H800, quantity, published_batch, steady.running / 32, "requests", FLOW_SOURCE, QUARTER)
    yield from _gains(H800, 32, base, variant, batch=83 / 30, gain=43, speed=280)


def _gains(
    case: str, gpus: int, base: Throughput, variant: Throughput, *, batch: float, gain: float, speed: float
) -> Iterator[PublishedRun]:
    predicted = variant.running / base.running
    yield PublishedRun(case, "batch gain", batch, predicted, "x", FLOW_SOURCE, QUARTER)
    predicted = 100 * (variant.tokens_per_second / base.tokens_per_second - 1)
    yield PublishedRun(case, "throughput gain", gain, predicted, "%", FLOW_SOURCE, THIRD)
    predicted = base.tokens_per_second / gpus
    yield PublishedRun(case, "speed per GPU without FlowMLA", speed, predicted, "tokens/s", FLOW_SOURCE, THIRD)


def _latent_batches() -> Iterator[PublishedRun]:
    shape, hardware = find_shape("MODEL", "DeepSeek-R1"), parse_hardware("--on", "8xH20")
    settings = EngineSettings(8, weights="fp8", tuned=True)
    prefill = prefill_time(shape, settings, hardware).seconds(256, 256**2)
    for requests, published_seconds in ((1, 14.16), (8, 22.81), (48, 40.10)):
        step = decode_step(shape, settings, hardware, requests, 256 + 1_024 / 2).total
        predicted = requests * prefill + 1_024 * step
        quantity = f"256 + 1,024 tokens, batch {requests}"
        yield PublishedRun(H20, quantity, published_seconds, predicted, "s", LATENT_SOURCE, THIRD)


def _dcp() -> Iterator[PublishedRun]:
    shape, hardware = find_shape("MODEL", "Qwen3-235B-A22B"), parse_hardware("--on", "8xH20")
    plain = EngineSettings(8, tuned=True)
    layouts = {"TP": plain, "DCP 2": replace(plain, dcp=2)}
    tokens = [engine_memory(shape, s, hardware).tokens for s in layouts.values()]
    predicted = tokens[1] / tokens[0]
    yield PublishedRun(QWEN, "KV capacity, DCP 2 against TP", 2, predicted, "x", DCP_SOURCE, 0.02)
    for output, clients, published_gain in (
        (4, 32, 0.2),
        (4, 48, 5.6),
        (4, 64, 9.6),
        (4, 80, 12),
        (4, 96, 16),
        (8, 80, 24.7),
    ):
        lengths = random_lengths(32_000, 1_000 * output, REQUESTS_PER_CLIENT * clients)
        base, variant = (simulate(shape, s, hardware, lengths, clients) for s in layouts.values())
        note = " (fitted)" if (output, clients) != (8, 80) and clients > 32 else ""
        quantity = f"32k/{output}k, gain at concurrency {clients}{note}"
        predicted = 100 * (variant.output_per_second / base.output_per_second - 1)
        yield PublishedRun(QWEN, quantity, published_gain, predicted, "%", DCP_SOURCE, THIRD, POINTS * (clients == 32))
        if clients == 96:
            for label, speed, result in (("TP", 4_897, base), ("DCP 2", 5_679, variant)):
                quantity = f"32k/4k, all tokens at concurrency 96, {label}"
                yield PublishedRun(QWEN, quantity, speed, result.total_per_second, "tokens/s", DCP_SOURCE, THIRD)
    lengths = random_lengths(32_000, 4_000, REQUESTS_PER_CLIENT)
    duration = simulate(shape, plain, hardware, lengths, 1).seconds
    yield PublishedRun(QWEN, "32k/4k, 10 requests, one at a time, TP", 217.32, duration, "s", DCP_SOURCE, THIRD)
    context = sum(prompt + output / 2 for prompt, output in lengths) / len(lengths)
    for (label, settings), time in zip(layouts.items(), (10.18, 10.86), strict=True):
        predicted = 1e3 * decode_step(shape, settings, hardware, 1, context).total
        yield PublishedRun(QWEN, f"time per token at batch 1, {label}", time, predicted, "ms", DCP_SOURCE, THIRD)


def lines() -> Iterator[str]:
    """Yield three tables of docs/planner.md in Markdown: published runs, traced peaks and constants."""
    yield from case_lines(cases())
    yield ""
    yield from _table(
        ("model", "layout", "tokens", "recompute", "logits chunk", "offload", "traced", "predicted", "error"),
        [
            (
                model,
                _layout(s),
                f"{s.tokens}",
                s.recompute,
                f"{s.logits_chunk}",
                f"{s.offload:g}",
                f"{peak:.1f} GiB",
                f"{p:.1f} GiB",
                f"{p / peak - 1:+.1%}",
            )
            for model, s, peak, p in traced_peaks()
        ],
    )
    yield ""
    rows = [(c.name, f"{c.value:.4g}", c.unit, c.source, c.fitted_on or "no") for c in CONSTANTS]
    yield from _table(("constant", "value", "unit", "source", "fitted"), rows)


def case_lines(rows: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the table of published cases in Markdown."""
    yield from _table(
        ("case", "quantity", "published", "predicted", "error", "bound", "source"),
        [
            (
                c.case,
                c.quantity,
                _number(c.published, c.unit),
                _number(c.predicted, c.unit),
                _error(c),
                _bound(c),
                c.source,
            )
            for c in rows
        ],
    )


def _layout(settings: TrainerSettings) -> str:
    sizes = {name: getattr(settings, name) for name in ("tp", "cp", "dp", "ep", "etp")}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def _number(value: float, unit: str) -> str:
    digits = 0 if unit in ("requests", "tokens/s") else 2 if unit in ("x", "ms") else 1
    return f"{value:,.{digits}f}{'' if unit in ('x', '%') else ' '}{unit}"


def _error(case: PublishedRun) -> str:
    if case.unit == "%":
        return f"{case.predicted - case.published:+.1f} points"
    return f"{case.predicted / case.published - 1:+.0%}" if case.published else "as published"


def _bound(case: PublishedRun) -> str:
    size = f"{case.max_difference:.1f} points" if case.unit == "%" else f"{case.tolerance:.0%}"
    return f"{size}: {'met' if case.is_met else 'not met'}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(print_output("\n".join(lines()) + "\n"))
