"""Peak memory of trainer layouts in traces, with the planner's predictions.

In a trace, megatron's code and torch's CUDA allocator run without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.planner.constants import GIB
from slime_like.planner.models import find_shape
from slime_like.planner.trainer import TrainerSettings, allocated_items


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A layout of the trainer that was traced, with the traced peak memory of a rank in GiB."""

    model: str
    settings: TrainerSettings
    peak: float


def traced_layouts() -> tuple[TracedRun, ...]:
    """Return the traced layouts of whole models.

    Each peak is that of a rank's second optimizer step, in which two thirds of the tokens are trained on.
    """

    def layout(model: str, peak: float, **fields: object) -> TracedRun:
        return TracedRun(model, replace(TrainerSettings(trained_share=2 / 3), **fields), peak)  # pyright: ignore[reportArgumentType]

    dense, sparse = "Qwen3-4B", "Qwen3-30B-A3B"
    return (
        layout(dense, 62.3, tp=2, dp=4, tokens=16_384),
        layout(dense, 22.6, tp=2, dp=4, tokens=16_384, recompute="full"),
        layout(dense, 21.1, tp=2, dp=4, tokens=9_216, recompute="full"),
        layout(dense, 123.3, tp=1, dp=8, tokens=16_384),
        layout(dense, 123.2, tp=1, dp=8, tokens=16_384, recompute="selective"),
        layout(dense, 74.9, tp=1, dp=1, tokens=8_192, recompute="full"),
        layout(dense, 20.2, tp=2, cp=2, dp=2, tokens=8_192, recompute="full"),
        layout(sparse, 71.2, tp=2, dp=4, ep=8, tokens=8_192, recompute="full", grouped_experts=False),
    )


def shortened_layouts() -> tuple[tuple[str, int, TrainerSettings, float], ...]:
    """Return traced layouts of models with fewer layers, as (model, number of layers, settings, peak in GiB).

    They show the memory of the decoder layers and of the output layer separately. The peaks of the ninth and all later
    layouts were predicted before they were traced.
    """
    base = TrainerSettings(trained_share=2 / 3)
    dense, sparse = "Qwen3-4B", "Qwen3-30B-A3B"
    experts = replace(base, tp=2, dp=4, ep=8, grouped_experts=False)
    context = replace(base, tp=2, cp=2, dp=2)
    return (
        (dense, 4, replace(base, dp=8), 16.33),
        (dense, 8, replace(base, dp=8), 23.97),
        (dense, 8, replace(base, dp=8, tokens=16_384), 36.04),
        (dense, 8, replace(base, tp=2, dp=4), 12.98),
        ("Qwen3-0.6B", 8, replace(base, dp=8), 11.69),
        ("Qwen3-8B", 8, replace(base, dp=8), 37.46),
        (sparse, 2, replace(experts, tp=1, dp=8), 15.56),
        (sparse, 4, replace(experts, tp=1, dp=8), 20.83),
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
    for row in traced_layouts():
        yield (
            row.model,
            row.settings,
            row.peak,
            allocated_items(find_shape("MODEL", row.model), row.settings).total / GIB,
        )
    for model, layers, settings, peak in shortened_layouts():
        full = find_shape("MODEL", model)
        shape = replace(full, layers=full.layers[:layers])
        yield f"{model}, {layers} layers", settings, peak, allocated_items(shape, settings).total / GIB
