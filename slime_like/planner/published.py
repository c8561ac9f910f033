"""Published and traced runs, each with the planner's prediction. ``python -m slime_like.planner.published`` prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime_like.planner.constants import CONSTANTS, GIB
from slime_like.planner.engine import engine_memory
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.hardware import parse_hardware
from slime_like.planner.models import find_shape
from slime_like.planner.speed import Throughput, Workload, calibrated_gain, throughput
from slime_like.planner.trainer import TrainerSettings, allocated_items
from slime_like.printable import print_output

FLOW_SOURCE = "SGLang pull request #7005 and its article"
DCP_SOURCE = "SGLang pull request #14982"
CALIBRATED, PURE = "published baseline", "model alone"
H20, H800 = "DeepSeek-R1 FP8, 8xH20", "DeepSeek-R1 BF16, 32xH800"
BASELINES = {H20: 128 * 8, H800: 280 * 32}
"""Case -> tokens per second of its baseline, published per GPU: input of the rows ``CALIBRATED``."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published number with the prediction for it; ``tolerance`` is relative to the published number, None: shown only."""

    name: str
    quantity: str
    published: float
    predicted: float
    unit: str
    tolerance: float | None
    source: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1 if self.published else float("nan")


@dataclass(frozen=True, slots=True)
class Traced:
    """A layout of the trainer that megatron's code and torch's allocator ran, with its peak in GiB."""

    model: str
    settings: TrainerSettings
    peak: float


def cases() -> tuple[PublishedRun, ...]:
    """Return every published case with its prediction."""
    return (*_flow_h20(), *_flow_h800(), *_dcp())


def _steady(name: str, on: str, settings: EngineSettings, workload: Workload, clients: int | None = None) -> Throughput:
    steady = throughput(find_shape("MODEL", name), settings, parse_hardware("--on", on), workload, clients)
    assert steady is not None, f"{name} fits {on}"
    return steady


def _flow_h20() -> Iterator[PublishedRun]:
    load, machine = Workload(1_024, 2_048), "8xH20"
    tensor = EngineSettings(8, weights="fp8", tuned=True)
    spread = replace(tensor, dp_attention=8, replicated_head=True)
    flow = replace(spread, flow_mla="output")
    name, shape, hardware = H20, find_shape("MODEL", "DeepSeek-R1"), parse_hardware("--on", machine)
    base, changed = (_steady("DeepSeek-R1", machine, settings, load) for settings in (tensor, flow))
    plain = engine_memory(shape, spread, hardware).requests(load.held_tokens)
    yield PublishedRun(name, "batch, TP (fitted)", 52, base.running, "requests", 0.02, FLOW_SOURCE)
    yield PublishedRun(name, "batch, DP attention (out of memory)", 0, plain, "requests", 0.0, FLOW_SOURCE)
    yield PublishedRun(name, "batch, FlowMLA", 136, changed.running, "requests", 0.25, FLOW_SOURCE)
    yield PublishedRun(name, "batch gain", 136 / 52, changed.running / base.running, "x", 0.25, FLOW_SOURCE)
    yield from _gains(name, base, changed, 0.41)


def _flow_h800() -> Iterator[PublishedRun]:
    load, machine = Workload(1_024, 2_048), "4x8xH800"
    spread = EngineSettings(32, dp_attention=32, tuned=True, replicated_head=True)
    name, shape = H800, find_shape("MODEL", "DeepSeek-R1")
    base, changed = (_steady("DeepSeek-R1", machine, s, load) for s in (spread, replace(spread, flow_mla="output")))
    # The article counts each projection once; an engine also keeps kv_up in its absorbed form.
    attention = 2 * shape.count("latent") * shape.mixer_parameters("latent") / 1e9
    yield PublishedRun(name, "attention weights per GPU", 22, attention, "GB", 0.05, FLOW_SOURCE)
    yield PublishedRun(name, "batch per GPU, DP attention", 30, base.running / 32, "requests", 0.25, FLOW_SOURCE)
    yield PublishedRun(name, "batch per GPU, FlowMLA", 83, changed.running / 32, "requests", 0.25, FLOW_SOURCE)
    yield PublishedRun(name, "batch gain", 83 / 30, changed.running / base.running, "x", 0.25, FLOW_SOURCE)
    yield from _gains(name, base, changed, 0.43)


def _gains(name: str, base: Throughput, changed: Throughput, published: float) -> Iterator[PublishedRun]:
    calibrated = calibrated_gain(base, changed, BASELINES[name])
    yield PublishedRun(
        name, f"throughput gain, {CALIBRATED}", 100 * published, 100 * calibrated, "%", 1 / 3, FLOW_SOURCE
    )
    single_speedup = changed.tokens_per_second / base.tokens_per_second - 1
    yield PublishedRun(name, f"throughput gain, {PURE}", 100 * published, 100 * single_speedup, "%", None, FLOW_SOURCE)


def _dcp() -> Iterator[PublishedRun]:
    name, machine, shape = "Qwen3-235B BF16, 8xH20", "8xH20", find_shape("MODEL", "Qwen3-235B-A22B")
    plain = EngineSettings(8, prefill_graphs=0)  # SGLang captured none when the pull request was written
    shared = replace(plain, dcp=2)
    tokens = [engine_memory(shape, s, parse_hardware("--on", machine)).tokens for s in (plain, shared)]
    yield PublishedRun(name, "KV capacity, DCP 2 against TP", 2, tokens[1] / tokens[0], "x", 0.02, DCP_SOURCE)
    short = Workload(32_768, 4_096, uniform=True)
    for clients, published_rate, tolerance in (
        (32, 0.2, None),
        (48, 5.6, None),
        (64, 9.6, None),
        (80, 12.0, 1 / 3),
        (96, 16.0, 1 / 3),
    ):
        base, changed = (_steady("Qwen3-235B-A22B", machine, s, short, clients) for s in (plain, shared))
        fitted = " (fitted)" if clients == 96 else ""
        gain = 100 * (changed.tokens_per_second / base.tokens_per_second - 1)
        yield PublishedRun(
            name, f"32k/4k, gain at concurrency {clients}{fitted}", published_rate, gain, "%", tolerance, DCP_SOURCE
        )
        if clients == 96:
            scale = (short.mean_input + short.mean_output) / short.mean_output
            for label, measured_rate, steady in (("TP", 4_897, base), ("DCP 2", 5_679, changed)):
                speed = scale * steady.tokens_per_second
                yield PublishedRun(
                    name, f"32k/4k, all tokens, {label}", measured_rate, speed, "tokens/s", 0.25, DCP_SOURCE
                )
    long = Workload(32_768, 8_192, uniform=True)
    base, changed = (_steady("Qwen3-235B-A22B", machine, s, long, 80) for s in (plain, shared))
    gain = 100 * (changed.tokens_per_second / base.tokens_per_second - 1)
    yield PublishedRun(name, "32k/8k, gain at concurrency 80", 24.7, gain, "%", 1 / 3, DCP_SOURCE)
    one_request = [_steady("Qwen3-235B-A22B", machine, s, short, 1).step.total for s in (plain, shared)]
    yield PublishedRun(name, "time per token at batch 1, TP", 10.18, 1e3 * one_request[0], "ms", None, DCP_SOURCE)
    yield PublishedRun(name, "time per token at batch 1, DCP 2", 10.86, 1e3 * one_request[1], "ms", None, DCP_SOURCE)


def traced() -> tuple[Traced, ...]:
    """Return the traced layouts: the second optimizer step of a rank, two thirds of the tokens trained."""

    def layout(model: str, peak: float, **fields: object) -> Traced:
        return Traced(model, replace(TrainerSettings(trained_share=2 / 3), **fields), peak)  # pyright: ignore[reportArgumentType]

    dense, sparse = "Qwen3-4B", "Qwen3-30B-A3B"
    return (
        layout(dense, 62.3, tp=2, dp=4, tokens=16_384),
        layout(dense, 22.6, tp=2, dp=4, tokens=16_384, recompute="full"),
        layout(dense, 21.1, tp=2, dp=4, tokens=9_216, recompute="full"),
        layout(dense, 123.3, tp=1, dp=8, tokens=16_384),
        layout(dense, 123.2, tp=1, dp=8, tokens=16_384, recompute="selective"),
        layout(dense, 74.9, tp=1, dp=1, tokens=8_192, recompute="full"),
        layout(dense, 20.2, tp=2, cp=2, dp=2, tokens=8_192, recompute="full"),
        layout(sparse, 71.2, tp=2, dp=4, ep=8, tokens=8_192, recompute="full"),
    )


def shortened() -> tuple[tuple[str, int, TrainerSettings, float], ...]:
    """Return traced layouts of models with fewer layers: model, layers, settings, peak in GiB.

    They separate the layers from the output layer. Those from the ninth on were predicted before they were traced.
    """
    base = TrainerSettings(trained_share=2 / 3)
    dense, sparse = "Qwen3-4B", "Qwen3-30B-A3B"
    experts = replace(base, tp=2, dp=4, ep=8)
    context = replace(base, tp=2, cp=2, dp=2)
    return (
        (dense, 4, replace(base, dp=8), 16.33),
        (dense, 8, replace(base, dp=8), 23.97),
        (dense, 8, replace(base, dp=8, tokens=16_384), 36.04),
        (dense, 8, replace(base, tp=2, dp=4), 12.98),
        ("Qwen3-0.6B", 8, replace(base, dp=8), 11.69),
        ("Qwen3-8B", 8, replace(base, dp=8), 37.46),
        (sparse, 2, replace(base, dp=8, ep=8), 15.56),
        (sparse, 4, replace(base, dp=8, ep=8), 20.83),
        (dense, 8, replace(base, tp=2, dp=4, recompute="full"), 8.28),
        (dense, 4, replace(base, tp=2, dp=4, logits_chunk=1_024), 7.23),
        (dense, 4, replace(base, tp=2, dp=4, logits_chunk=1_024, recompute="full"), 4.88),
        (dense, 4, replace(base, tp=2, dp=4, offload=1.0), 7.75),
        (dense, 8, context, 12.75),
        (dense, 8, replace(context, recompute="full"), 7.81),
        ("Qwen3-8B", 4, replace(base, tp=2, dp=4), 14.65),
        (sparse, 2, experts, 9.63),
        (sparse, 4, experts, 13.57),
        (sparse, 4, replace(experts, recompute="full"), 11.15),
    )


def traced_peaks() -> Iterator[tuple[str, TrainerSettings, float, float]]:
    """Yield (model, settings, traced peak, predicted peak) in GiB of every traced layout."""
    for row in traced():
        yield (
            row.model,
            row.settings,
            row.peak,
            allocated_items(find_shape("MODEL", row.model), row.settings).total / GIB,
        )
    for model, layers, settings, peak in shortened():
        full = find_shape("MODEL", model)
        shape = replace(full, layers=full.layers[:layers])
        yield f"{model}, {layers} layers", settings, peak, allocated_items(shape, settings).total / GIB


def lines() -> Iterator[str]:
    """Yield the tables of docs/planner.md in Markdown."""
    yield from _table(
        ("case", "quantity", "published", "predicted", "error", "source"),
        [
            (c.name, c.quantity, _number(c.published, c.unit), _number(c.predicted, c.unit), _error(c), c.source)
            for c in cases()
        ],
    )
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


def _layout(settings: TrainerSettings) -> str:
    sizes = {name: getattr(settings, name) for name in ("tp", "cp", "dp", "ep")}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def _number(value: float, unit: str) -> str:
    digits = 0 if unit in ("requests", "tokens/s") else 2 if unit in ("x", "ms") else 1
    return f"{value:,.{digits}f}{'' if unit in ('x', '%') else ' '}{unit}"


def _error(case: PublishedRun) -> str:
    if case.unit == "%":
        return f"{case.predicted - case.published:+.1f} points"
    return f"{case.error:+.0%}" if case.published else "as published"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(print_output("\n".join(lines()) + "\n"))
