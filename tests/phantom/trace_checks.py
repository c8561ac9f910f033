"""Traces of trainer ranks at real shapes on a phantom GPU, and the planner's estimates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.traced_rank import traces
from slime_like.config.load.loader import load_config
from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.residency import PUSH, SAVE
from slime_like.config.schema.resolved import Layout
from slime_like.planner.models import find_shape, table_config
from slime_like.planner.trainer import TrainerSettings, stage_items
from tests.train.models import make_spec
from tests.train.ranks import RankWorld


@dataclass(frozen=True)
class TraceCase:
    """A model of the planner's table with fewer layers, and a rank of a layout."""

    model: str
    layers: int
    layout: Layout
    tokens: int = 8_192
    recompute: str = "none"
    chunk: int = 4_096
    offload: float = 0.0
    rank: int = 0
    num_micro_batches: int = 2
    trained_share: float = 2 / 3
    keys: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> TrainerSettings:
        """Return the planner's settings of this layout."""
        sizes = {name: getattr(self.layout, name) for name in ("tp", "pp", "cp", "dp", "ep", "etp")}
        return TrainerSettings(
            **sizes,
            tokens=self.tokens,
            recompute=self.recompute,
            logits_chunk=self.chunk,
            offload=self.offload,
            trained_share=self.trained_share,
            num_micro_batches=self.num_micro_batches,
            sequence_parallel=self.layout.sequence_parallel,
        )


def trace_all(
    world: RankWorld, scratch: Path, layouts: Mapping[str, TraceCase], recipes: Sequence[str], machine: str
) -> dict[str, Any]:
    """Return the traced and the planned peak of each layout, and the free memory of the GPUs under each recipe."""
    del world
    return {
        **{name: _trace(scratch / name.replace(" ", "_"), layout) for name, layout in layouts.items()},
        **{name: _recipe(name, machine) for name in recipes},
    }


def _trace(folder: Path, traced: TraceCase) -> dict[str, float]:
    from slime_like.train.megatron.trace.memory import TracedBatch, trace_rank

    values = dict(table_config(traced.model) or {})
    values["num_hidden_layers"] = traced.layers
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    offload = {"cpu_offload": True, "cpu_offload_fraction": traced.offload} if traced.offload else {}
    keys = {"logits_chunk": traced.chunk, "recompute": traced.recompute, "gdn": GDNConfig(backend="torch")}
    spec = make_spec(
        folder,
        traced.layout,
        device="cuda",
        dtype="bfloat16",
        max_tokens_per_rank=traced.tokens,
        model={**keys, **traced.keys},
        optim={"lr": 1e-6, **offload},
    )
    trace = trace_rank(spec, traced.rank, TracedBatch(2_048, traced.num_micro_batches, traced.trained_share))
    shape = find_shape("MODEL", traced.model)
    stage = traced.rank * traced.layout.pp // traced.layout.world_size
    plan_table = stage_items(replace(shape, layers=shape.layers[: traced.layers]), traced.settings, stage)
    step = next(phase for phase in trace.phases if phase.name == "step")
    return {
        "traced": step.allocated,
        "planned": plan_table.total,
        "weights": plan_table.of("weights") / trace.weights,
        "gradients": plan_table.of("gradients") / trace.gradients,
    }


def _recipe(name: str, machine: str) -> dict[str, float]:
    """Return the largest sum of a recipe's traced trainer and planned engine on a GPU, the memory that both contexts leave there,
    and traced and planned peaks of the trainer.
    """
    argv = [f"+recipe={name}"]
    (trace, *_) = traces(argv, machine)
    plan = make_plan(load_config(argv, files=False, machine=False), described_machine(machine))
    tables = dict(plan.memory.tables)
    outside = ("allocator", "CUDA context", "communicators")
    peaks = {phase["name"]: phase for phase in trace["phases"]}
    largest = max(trace["phases"], key=lambda phase: phase["allocated"])
    sums, plan_totals = [], {"step": tables["trainer"].total - tables["trainer"].of(*outside)}
    for phase in plan.memory.phases:
        roles = dict(phase.tables)
        if "trainer" in roles and phase.name != SAVE:
            sums.append(
                peaks.get(phase.name, largest)["reserved"] + (roles["engine"].total if "engine" in roles else 0.0)
            )
            if phase.name == PUSH:
                plan_totals[PUSH] = roles["trainer"].total - roles["trainer"].of(*outside)
    return {
        "traced": max(sums, default=largest["reserved"]),
        "left": plan.memory.available - tables["trainer"].of(*outside[1:]),
        **{f"{phase} allocated": (peaks[phase] if phase == PUSH else largest)["allocated"] for phase in plan_totals},
        **{f"{phase} planned": num_bytes for phase, num_bytes in plan_totals.items()},
    }
