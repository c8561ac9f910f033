"""Text of the planner's answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slime_like.hardware import Hardware
from slime_like.planner.answer import Change, EngineAnswer, Phases
from slime_like.planner.constants import GIB
from slime_like.planner.decode import StepTime
from slime_like.planner.shapes import ModelShape
from slime_like.planner.speed import Workload
from slime_like.planner.table import MemoryTable, gib
from slime_like.planner.trainer import TrainerSettings, trainer_memory
from slime_like.planner.trainer_changes import FLAGS, trainer_changes
from slime_like.util.counted import counted


def memory_lines(table: MemoryTable, available: float | None = None) -> Iterator[str]:
    """Yield one line per item, then the total and, if given, the ``available`` memory."""
    rows = [(item.name, gib(item.num_bytes), item.note) for item in table.items]
    rows.append(("total", gib(table.total), "" if available is None else f"of {gib(available)}"))
    yield from columns(rows)


def engine_lines(
    shape: ModelShape, hardware: Hardware, workload: Workload, now: EngineAnswer, alternatives: Iterable[Change]
) -> Iterator[str]:
    """Yield the memory of an engine rank, the batch that fits, its speed, and the effect of each change in ``alternatives``."""
    s, memory = now.settings, now.memory
    layout = f"tp {s.gpus}" + (f", dp attention {s.dp_attention}" if s.dp_attention > 1 else "")
    layout += (f", dcp {s.dcp}" if s.dcp > 1 else "") + (f", FlowMLA of {' '.join(s.flow_mla)}" if s.flow_mla else "")
    yield f"engine of {counted(s.gpus, 'GPU')} ({layout}, weights {s.weights}), per GPU"
    yield from memory_lines(memory.table, hardware.gpu.memory)
    yield ""
    state = f", {gib(memory.slot_bytes)} of recurrent state per request" if memory.slot_bytes else ""
    yield f"KV cache   {memory.token_bytes / 1024:.1f} KiB per token on each GPU{state}; {memory.tokens:,} tokens per engine"
    lengths = f"{'up to ' * workload.uniform}{workload.input} + {workload.output} tokens"
    if now.steady is None:
        yield f"batch      no request of {lengths} fits: limited by {now.limit}"
    else:
        step = now.steady.step
        yield f"batch      {counted(now.steady.running, 'request')} of {lengths}, limited by {now.limit}"
        yield f"decode     {_step_text(step)}; prefill {1e3 * now.steady.prefill:.0f} ms per request"
        engines = hardware.num_gpus // s.gpus
        speed = now.steady.tokens_per_second
        yield f"throughput {speed:,.0f} tokens/s per engine, {engines * speed:,.0f} with {counted(engines, 'engine')} on {hardware}"
    rows = [_change_row(now, change) for change in alternatives]
    if rows:
        yield ""
        yield "changes, each alone"
        yield from columns([("", "KV tokens", "batch", "tokens/s per GPU", ""), *rows])


def trainer_lines(
    shape: ModelShape, settings: TrainerSettings, table: MemoryTable, hardware: Hardware
) -> Iterator[str]:
    """Yield the memory of a trainer rank, and how each single change in ``trainer_changes`` affects it."""
    s, memory = settings, hardware.gpu.memory
    place = f", {table.place}" if table.place else ""
    yield (
        f"trainer rank (tp {s.tp}, pp {s.pp}, cp {s.cp}, dp {s.dp}, ep {s.ep}, etp {s.etp}; {s.tokens} tokens, recompute "
        f"{s.recompute}), per GPU{place}"
    )
    yield from memory_lines(table, memory)
    yield ""
    yield "single changes, on the same number of GPUs"
    rows = [("", "per GPU", "change", "")]
    for change in trainer_changes(shape, s):
        total = trainer_memory(shape, change.settings).total
        note = "" if total <= memory else "does not fit"
        rows.append((change.text(FLAGS, " "), gib(total), f"{(total - table.total) / GIB:+.1f} GiB", note))
    yield from columns(rows)


def phase_lines(phases: Iterable[Phases], hardware: Hardware) -> Iterator[str]:
    """Yield the memory of a GPU that trainer and engine share, by phase, for each way of sharing it."""
    yield f"trainer and engine on one GPU of {gib(hardware.gpu.memory)}"
    rows = [(phase.name, gib(phase.training), gib(phase.sampling), gib(phase.kv_bytes), "") for phase in phases]
    yield from columns([("", "training", "sampling", "space for KV", ""), *rows])


def _change_row(now: EngineAnswer, change: Change) -> tuple[str, ...]:
    steady = change.answer.steady
    if steady is None:
        return change.flag, f"{change.answer.memory.tokens:,}", "0", "does not fit", ""
    per_gpu = steady.tokens_per_second / change.answer.settings.gpus
    gain = ""
    if now.steady is not None:
        gain = f"{per_gpu / (now.steady.tokens_per_second / now.settings.gpus) - 1:+.0%}"
    return change.flag, f"{change.answer.memory.tokens:,}", str(steady.running), f"{per_gpu:,.0f}", gain


def _step_text(step: StepTime) -> str:
    causes = {
        "weights": step.weights,
        "attention": step.attention,
        "collectives": step.collectives,
        "DCP exchange": step.exchange,
        "kernels": step.fixed,
        "FlowMLA prefetch": step.prefetch,
    }
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in causes.items() if seconds)
    return f"{1e3 * step.total:.1f} ms per step: {parts}"


def model_line(shape: ModelShape) -> str:
    """Describe a model in one line."""
    active = "" if shape.experts is None else f" ({shape.active_parameters / 1e9:.1f}B active)"
    return f"{shape.name}: {shape.parameters / 1e9:.2f}B parameters{active}, {counted(len(shape.layers), 'layer')}"


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows with aligned columns: first and last column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, last) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
