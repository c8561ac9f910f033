"""Trace the memory of the trainer's ranks, and compare it with the planner's estimate: ``train.py --plan --trace``.

A child process runs a step of the run's own configuration on a phantom GPU (``traced_rank``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.host import actor_host_memory
from slime_like.cluster.plan.phases import FIXED
from slime_like.cluster.plan.planner import Plan
from slime_like.config.schema.residency import PUSH, SAVE, STEP
from slime_like.errors import ConfigError
from slime_like.phantom.device import PhantomGpu
from slime_like.planner.table import MemoryTable, gib
from slime_like.planner.trainer import BUILD, build_bytes, stage_items
from slime_like.planner.view import columns
from slime_like.util.deadline import Deadline

TRACED_RANK = "slime_like.cluster.plan.traced_rank"
TRACE_SECONDS = 1_800
TRACED_GPU = PhantomGpu(memory_bytes=1 << 42, host_limit=1 << 20)
"""Phantom GPU of a trace, with enough memory to trace even a rank that fits no real GPU.

A host tensor above 1 MiB, such as offloaded state, takes no memory of this machine. It would have no values anyway, because
a phantom GPU carries out no larger copy.
"""
SMALL = 64 << 20  # bytes of host memory that a rank without offloaded state takes for its batches
TRANSFER = "transfer"  # traced phase of a push
RESIDENT = ("weights", "gradients", "optimizer")


def trace_lines(plan: Plan, argv: Sequence[str], description: str | None) -> Iterator[str]:
    """Trace the run's trainer and yield lines that describe its memory.

    Raises ``ConfigError`` if there is nothing to trace or the trace fails.
    """
    check_traceable(plan, "--trace")
    for trace in run_trace(argv, description):
        yield from _lines(plan, trace)


def check_traceable(plan: Plan, subject: str) -> None:
    """Raise ``ConfigError``, whose message begins with ``subject``, if the plan has no trainer on GPUs."""
    if not plan.needs_trainer or plan.actor.device != "cuda":
        raise ConfigError(
            f"{subject} runs a step of a trainer rank on a phantom GPU, and this plan has no trainer on GPUs: set "
            "placement.device=cuda, or describe GPUs with --plan-for 8xH100"
        )


def run_trace(argv: Sequence[str], description: str | None) -> list[dict[str, Any]]:
    """Trace a rank of the first pipeline stage and, if there are several stages, a rank of the last; return the traces.

    Raises ``ConfigError`` if the child process that does this fails or takes too long.
    """
    request = {"argv": list(argv), "machine": description}
    return run_on_phantom("trace", TRACED_RANK, request, TRACED_GPU.environment(), TRACE_SECONDS)


def run_on_phantom(
    subject: str, module: str, request: Mapping[str, Any], variables: Mapping[str, str], seconds: float
) -> list[dict[str, Any]]:
    """Run ``python -m module REQUEST RESULT`` in a child process; return the contents of RESULT.

    ``subject`` names the work in error messages. ``variables`` are added to the child's environment and select its phantom
    GPU. Raises ``ConfigError`` if the child fails, with the last line of its stderr, or if it takes longer than ``seconds``
    times ``SLIME_LIKE_DEADLINE_FACTOR``.
    """
    limit = Deadline("driver", subject, seconds).remaining(module)
    environment = {**os.environ, **variables}
    environment.setdefault("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([path for path in (*sys.path, environment["PYTHONPATH"]) if path])
    with tempfile.TemporaryDirectory(prefix="slime_like-trace-") as folder:
        request_file, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request_file.write_text(json.dumps(dict(request)), encoding="utf-8")
        command = [sys.executable, "-m", module, str(request_file), str(result)]
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired as late:
            raise ConfigError(
                f"the {subject} took more than {limit:.0f} s: use a model with fewer layers, or set "
                "SLIME_LIKE_DEADLINE_FACTOR"
            ) from late
        if child.returncode != 0 or not result.is_file():
            lines = [line for line in child.stderr.splitlines() if line.strip()]
            raise ConfigError(f"the {subject} failed: {' '.join(lines[-1:]) or f'exit code {child.returncode}'}")
        return json.loads(result.read_text(encoding="utf-8"))


def _lines(plan: Plan, trace: dict[str, Any]) -> Iterator[str]:
    """Yield lines that describe one traced rank."""
    stages = plan.actor.layout.pp
    place = f"pipeline stage {trace['stage'] + 1} of {stages}, " if stages > 1 else ""
    yield ""
    yield (
        f"trace      a trainer rank on a phantom GPU: {place}{trace['num_micro_batches']} micro-batches of "
        f"{plan.actor.max_tokens_per_rank:,} tokens in sequences of {trace['length']:,}{trace['note']}"
    )
    peaks = {phase["name"]: phase["allocated"] for phase in trace["phases"]}
    peak, table = peaks[STEP], planned_items(plan, trace["stage"])
    rows = [("", "traced", "planned", "")]
    for name in RESIDENT:
        rows.append((name, gib(trace[name]), "-" if table is None else gib(table.of(name)), ""))
    resident = sum(trace[name] for name in RESIDENT)
    planned_peak = None if table is None else table.total - table.of(BUILD)
    other_bytes = (
        None if table is None or planned_peak is None else planned_peak - sum(table.of(name) for name in RESIDENT)
    )
    rows.append(
        ("activations and temporary", gib(peak - resident), "-" if other_bytes is None else gib(other_bytes), "")
    )
    rows.append(_comparison_row("peak of a step", peak, planned_peak))
    rows.append(_comparison_row("peak of the build", peaks[BUILD], planned_build_bytes(plan, trace["stage"])))
    rows += [*_push_row(plan, trace), *_host_row(plan, trace)]
    yield from columns(rows)
    phases = ", ".join(f"{p['name']} {gib(p['allocated'])} (reserved {gib(p['reserved'])})" for p in trace["phases"])
    yield f"  phases: {phases}; without CUDA context and communicators"
    if plan.memory.unknown:
        return
    sums, available = gpu_totals(plan, trace), plan.memory.available
    verdict = "fits" if max(sums.values()) <= available else "does not fit"
    text = ", ".join(f"{name} {gib(num_bytes)}".strip() for name, num_bytes in sums.items())
    yield f"  a GPU, with the planned memory of its other processes: {text} of {gib(available)}: {verdict}"


def _comparison_row(name: str, traced_bytes: float, planned_bytes: float | None) -> tuple[str, str, str, str]:
    """Return the table row that compares a traced number of bytes with the planned one."""
    if planned_bytes is None:
        return name, gib(traced_bytes), "-", ""
    return name, gib(traced_bytes), gib(planned_bytes), f"planner {planned_bytes / traced_bytes - 1:+.1%}"


def gpu_totals(plan: Plan, trace: dict[str, Any]) -> dict[str, float]:
    """Return the bytes on the busiest GPU with a trainer rank by traced phase.

    They are the memory that torch reserves for the rank, plus the planned rest: the rank's CUDA context and communicators,
    and the other roles on the GPU. For the traced transfer of weights, the rest is taken from the planned phase "save": in
    both, an engine has only its weights in memory. If all planned phases have the same memory, the result has one phase, with
    an empty name.
    """
    reserved = {phase["name"]: phase["reserved"] for phase in trace["phases"]}
    reserved[""] = max(reserved.values())
    reserved[STEP] = max(reserved[STEP], reserved[BUILD])  # other roles have the same memory in both
    # A rank whose state is not offloaded keeps what torch has reserved, and records no phases but build, step and transfer.
    is_offloaded = PUSH in reserved
    sums: dict[str, float] = {}
    for phase in plan.memory.trainer_phases:
        roles = dict(phase.tables)
        name, trainer = TRANSFER if phase.name == SAVE else phase.name, roles.pop("trainer")
        other_total = sum(table.total for table in roles.values())
        sums[name] = reserved[name if name in reserved or is_offloaded else ""] + trainer.of(*FIXED) + other_total
    return sums


def _push_row(plan: Plan, trace: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the row for the end of a push, when the trainer has only its weights.

    Return no row if the trainer's state is not offloaded, the memory of a GPU was not predicted, or there are several pipeline
    stages.
    """
    traced = next((phase["allocated"] for phase in trace["phases"] if phase["name"] == PUSH), None)
    table = next((dict(phase.tables)["trainer"] for phase in plan.memory.trainer_phases if phase.name == PUSH), None)
    if traced is None or table is None or plan.actor.layout.pp > 1:
        return []
    return [_comparison_row("peak at the end of a push", traced, table.total - table.of("allocator", *FIXED))]


def _host_row(plan: Plan, trace: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the row for a rank's tensors in main memory; no row if they are below ``SMALL`` or there is no estimate."""
    traced_bytes, planned_bytes = trace["pinned"] + trace["pageable"], planned_host_bytes(plan, trace["stage"])
    if traced_bytes < SMALL or planned_bytes is None:
        return []
    return [_comparison_row("main memory", traced_bytes, planned_bytes)]


def planned_items(plan: Plan, stage: int) -> MemoryTable | None:
    """Return the planner's estimate of the tensors of a rank of pipeline stage ``stage``; None if there is no estimate."""
    demand = plan.memory.demand
    if demand is None or demand.shapes.actor is None:
        return None
    return stage_items(demand.shapes.actor, demand.settings, stage)


def planned_build_bytes(plan: Plan, stage: int) -> float | None:
    """Return the planned number of bytes that torch allocates while a rank of ``stage`` is built; None if it is unknown."""
    demand = plan.memory.demand
    if demand is None or demand.shapes.actor is None:
        return None
    return build_bytes(demand.shapes.actor, demand.settings, stage)


def planned_host_bytes(plan: Plan, stage: int) -> float | None:
    """Return the planner's estimate of the bytes of a rank's tensors in main memory after a step; None if there is none."""
    demand = plan.memory.demand
    if demand is None or demand.shapes.actor is None:
        return None
    table = actor_host_memory(demand, demand.shapes.actor, stage)
    return table.total - table.of("processes", "checkpoint", BUILD)
