"""Text of a plan's memory: a line per role, the sequences that fit the KV cache, a plot, and the effect of each change."""

from __future__ import annotations

from collections.abc import Iterator

from slime_like.cluster.plan.admission import EngineLoad
from slime_like.cluster.plan.changes import SettingChange, changes
from slime_like.cluster.plan.dcp import DcpPlan
from slime_like.cluster.plan.demand import MemoryPlan
from slime_like.planner.plot import Bar, text_plot
from slime_like.planner.table import MemoryTable, gib
from slime_like.planner.view import columns


def memory_lines(plan: MemoryPlan, load: EngineLoad) -> Iterator[str]:
    """Yield lines on the memory of each role, of a GPU and of a node, and on the number of sequences that fit the KV cache."""
    if plan.unknown:
        yield f"memory     not predicted: {plan.unknown}"
        return
    if plan.gpu:
        busiest, source = " + ".join(plan.busiest), f"; {plan.source}" * bool(plan.source)
        phase = f" in phase {plan.peak.name}" if plan.peak.name else ""
        yield f"memory     {gib(plan.needed_bytes)} of {gib(plan.available)} on each GPU with {busiest}{phase} ({plan.gpu}{source})"
    else:
        yield f"memory     resident, of each trainer rank and engine, on a machine with {gib(plan.available)}"
    for role, table in plan.tables:
        place = f" on {table.place}" if table.place else ""
        yield f"  {role:<9}{gib(table.total)}{place}: {_parts(table)}"
    if len(plan.phases) > 1:
        phases = ", ".join(f"{phase.name} {gib(phase.total)}" for phase in plan.phases)
        yield f"  of a GPU by phase: {phases}"
    if plan.host is not None:
        yield f"  main memory of a node {gib(plan.host.total)}: {_parts(plan.host)}"
    if plan.engine is not None:
        yield (
            f"  KV cache {plan.engine.tokens:,} tokens per engine: {plan.engine.requests(load.sequence_len):,} sequences of "
            f"{load.sequence_len:,} tokens; a rollout samples {load.num_samples:,} per engine, limited by {load.limit_on(plan.engine)}"
        )


def plot_lines(plan: MemoryPlan) -> Iterator[str]:
    """Yield a plot of the memory of each role, scaled to the memory of a GPU or, in a run on a CPU, of the machine.

    If several roles share the busiest GPU or the CPU, another bar shows their total, on a GPU in the phase that needs most.
    """
    if not plan.tables:
        return
    bars = [Bar(role, table) for role, table in plan.tables]
    if len(plan.by_role.items) > 1:
        bars.append(Bar(plan.peak.name or "together", plan.by_role))
    yield ""
    yield from text_plot(bars, plan.available)


def change_lines(plan: MemoryPlan, load: EngineLoad, dcp: DcpPlan) -> Iterator[str]:
    """Yield a table with the effect of each single change of a setting."""
    if plan.demand is None:
        return
    rows = [_row(change, plan, load) for change in (SettingChange("as set", plan), *changes(plan.demand, dcp))]
    if len(rows) == 1:
        return
    head = ("", "trainer", "engine", "on a GPU", "KV tokens", "sequences", "")
    columns_in_use = [i for i in range(len(head)) if plan.gpu or head[i] != "on a GPU"]
    yield ""
    yield "changes, each alone"
    yield from columns([tuple(row[i] for i in columns_in_use) for row in (head, *rows)])


def _row(change: SettingChange, base: MemoryPlan, load: EngineLoad) -> tuple[str, ...]:
    """Return the table row of ``change``; the note in the last cell says if the changed run does not fit the GPUs of ``base``.

    The cells before it: setting, memory of a trainer rank, of an engine and of the busiest GPU, KV cache of an engine in
    tokens and in sequences.
    """
    plan, tables = change.plan, dict(change.plan.tables)
    trainer, engine = (gib(tables[role].total) if role in tables else "-" for role in ("trainer", "engine"))
    tokens = "-" if plan.engine is None else f"{plan.engine.tokens:,}"
    sequences = "-" if plan.engine is None else f"{plan.engine.requests(load.sequence_len):,}"
    note = "does not fit" if plan.gpu and plan.needed_bytes > base.available else ""
    return change.setting, trainer, engine, gib(plan.needed_bytes), tokens, sequences, note


def _parts(table: MemoryTable) -> str:
    return ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in table.items)
