"""Single changes of a trainer's layout or options, whose effect on memory the planner shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from slime_like.planner.shapes import ModelShape
from slime_like.planner.stages import even_sizes
from slime_like.planner.trainer import TrainerSettings

FLAGS = {
    "tp": "--train-tp",
    "pp": "--train-pp",
    "cp": "--train-cp",
    "ep": "--train-ep",
    "etp": "--train-etp",
    "tokens": "--tokens",
    "recompute": "--recompute",
    "logits_chunk": "--logits-chunk",
    "offload": "--offload",
    "distributed_optimizer": "--distributed-optimizer",
}
"""Field of ``TrainerSettings`` that a change sets -> flag of the planner's command line."""


@dataclass(frozen=True, slots=True)
class TrainerChange:
    """Change of a trainer's settings that keeps the number of GPUs."""

    values: tuple[tuple[str, str], ...]  # field of TrainerSettings and its new value
    settings: TrainerSettings

    def text(self, names: Mapping[str, str], sign: str) -> str:
        """Return the change as text: for each changed field its name in ``names``, ``sign`` and the new value.

        Example: ``--recompute full`` with names ``FLAGS`` and a space as sign.
        """
        return " ".join(f"{names[field]}{sign}{value}" for field, value in self.values)


def trainer_changes(shape: ModelShape, settings: TrainerSettings) -> Iterator[TrainerChange]:
    """Yield the applicable changes, each with the settings after this change alone.

    A change of tp, pp or cp doubles that size, halves the data-parallel size and doubles the micro-batches per rank; cp also
    halves the tokens per rank, and an increase of tp from 1 turns on sequence parallelism. A change of ep only doubles ep.
    """
    s = settings
    if s.recompute != "full":
        yield _change(s, recompute="full")
    elif (
        s.recompute_method == "uniform"
    ):  # with another method, recompute=none is rejected, because the method would have no effect
        yield _change(s, recompute="none")
    if s.dtype == "bfloat16" and s.distributed_optimizer and s.offload < 1:
        yield _change(s, offload=1.0)
    if s.dp * s.cp > 1 and not s.offload:
        yield _change(s, distributed_optimizer=not s.distributed_optimizer)
    if s.logits_chunk > 1:
        yield _change(s, logits_chunk=max(1, s.logits_chunk // 4))
    if s.tokens > 1:
        yield _change(s, tokens=s.tokens // 2)
    yield from _parallel_changes(shape, s)


def _parallel_changes(shape: ModelShape, settings: TrainerSettings) -> Iterator[TrainerChange]:
    s = settings
    if (
        shape.experts is not None
        and s.tp * s.cp * s.dp % (2 * s.ep * s.etp) == 0
        and shape.experts.num_experts % (2 * s.ep) == 0
    ):
        yield _change(s, ep=2 * s.ep)
    if s.dp % 2:
        return
    half_dp = replace(s, dp=s.dp // 2, num_micro_batches=s.num_micro_batches and 2 * s.num_micro_batches)
    if shape.heads % (2 * s.tp) == 0 and shape.kv_heads % (2 * s.tp) == 0:
        # With tp=1 a run has no sequence parallelism; with a larger tp it is on by default.
        yield _change(replace(half_dp, sequence_parallel=s.sequence_parallel or s.tp == 1), tp=2 * s.tp)
    if s.tokens > 1:  # with half the tokens on each cp rank, a micro-batch is as long as before
        yield _change(half_dp, cp=2 * s.cp, tokens=s.tokens // 2)
    num_segments = 2 * max(len(s.segments), s.pp)  # as many per rank as before
    if num_segments <= len(shape.layers) and s.tp * s.cp * half_dp.dp % (s.ep * s.etp) == 0:
        segments = even_sizes(len(shape.layers), num_segments) if len(s.segments) > s.pp else ()
        yield _change(replace(half_dp, segments=segments), pp=2 * s.pp)


def _change(settings: TrainerSettings, **values: str | float) -> TrainerChange:
    changed_settings = replace(settings, **values)  # pyright: ignore[reportArgumentType]
    return TrainerChange(tuple((name, _text(value)) for name, value in values.items()), changed_settings)


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value:g}"
