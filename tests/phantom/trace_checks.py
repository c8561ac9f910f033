"""Traces of trainer ranks at real shapes on a phantom GPU, and the planner's estimates."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.phases import FIXED
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.trace import gpu_totals, planned_build_bytes, planned_host_bytes, planned_items
from slime_like.cluster.plan.traced_rank import traces
from slime_like.config.load.loader import load_config
from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.residency import PUSH, STEP
from slime_like.config.schema.resolved import Layout
from slime_like.planner.models import find_shape, table_config
from slime_like.planner.offload import offload_items
from slime_like.planner.trainer import BUILD, TrainerSettings, build_bytes, stage_items
from tests.train.models import make_spec
from tests.train.ranks import RankWorld

SMALL_BYTES = 64 << 20  # of buffers that the planner does not count


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
        num_segments = self.layout.pp * self.layout.vpp
        return TrainerSettings(
            **sizes,
            tokens=self.tokens,
            recompute=self.recompute,
            logits_chunk=self.chunk,
            offload=self.offload,
            trained_share=self.trained_share,
            num_micro_batches=self.num_micro_batches,
            sequence_parallel=self.layout.sequence_parallel,
            segments=(self.layers // num_segments,) * num_segments,
        )


def trace_all(
    world: RankWorld, scratch: Path, layouts: Mapping[str, TraceCase], recipes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the traced and the planned memory of each layout, and of each recipe on the machine that it names."""
    del world
    return {
        **{name: _trace(scratch / name.replace(" ", "_"), layout) for name, layout in layouts.items()},
        **{name: trace_recipe(name, machine) for name, machine in recipes.items()},
    }


def _trace(folder: Path, traced: TraceCase) -> dict[str, float]:
    from slime_like.train.megatron.trace.memory import TracedBatch, trace_rank

    values = copy.deepcopy(dict(table_config(traced.model) or {}))
    text_values = values.get("text_config", values)
    text_values["num_hidden_layers"] = traced.layers
    if "layer_types" in text_values:
        text_values["layer_types"] = text_values["layer_types"][: traced.layers]
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
    shape = replace(shape, layers=shape.layers[: traced.layers])
    plan_table = stage_items(shape, traced.settings, stage)
    on_host = offload_items(shape, traced.settings, stage=stage)
    peaks = {phase.name: phase.allocated for phase in trace.phases}
    return {
        "traced": peaks[STEP],
        "planned": plan_table.total - plan_table.of(BUILD),
        "build": build_bytes(shape, traced.settings, stage) / peaks[BUILD],
        "weights": plan_table.of("weights") / trace.weights,
        "gradients": plan_table.of("gradients") / trace.gradients,
        "main memory traced": trace.pinned + trace.pageable,
        "main memory planned": on_host.of("offloaded optimizer", "pinned gradients"),
    }


def trace_one(world: RankWorld, name: str, machine: str) -> list[dict[str, float]]:
    """Return the traced and the planned memory of a recipe."""
    del world
    return trace_recipe(name, machine)


def trace_recipe(name: str, machine: str) -> list[dict[str, float]]:
    """Return the traced and the planned memory of a recipe's trainer in its first and in its last pipeline stage."""
    argv = [f"+recipe={name}"]
    plan = make_plan(load_config(argv, files=False, machine=False), described_machine(machine))
    return [_compared(plan, trace) for trace in traces(argv, machine)]


def _compared(plan: Plan, trace: dict[str, Any]) -> dict[str, float]:
    planned = planned_items(plan, trace["stage"])
    assert planned is not None
    peaks = {phase["name"]: phase["allocated"] for phase in trace["phases"]}
    out = {
        "largest sum": max(gpu_totals(plan, trace).values()),
        "available": plan.memory.available,
        "step traced": peaks[STEP],
        "step planned": planned.total - planned.of(BUILD),
        "build traced": peaks[BUILD],
        "build planned": planned_build_bytes(plan, trace["stage"]) or 0.0,
        "main memory traced": trace["pinned"] + trace["pageable"],
        "main memory planned": planned_host_bytes(plan, trace["stage"]) or 0.0,
    }
    push = next((dict(phase.tables)["trainer"] for phase in plan.memory.trainer_phases if phase.name == PUSH), None)
    if push is not None:
        out |= {"push traced": peaks[PUSH], "push planned": push.total - push.of("allocator", *FIXED)}
    return out


def check_recipe(name: str, results: Sequence[Mapping[str, float]]) -> None:
    """Assert that a recipe fits its machine, and that the planner agrees with traces within 10% or ``SMALL_BYTES``."""
    offloads = load_config([f"+recipe={name}"], files=False, machine=False).placement.offload_train
    for result in results:
        assert result["largest sum"] <= result["available"], f"{name}: {result}"
        numbers = {key.removesuffix(" planned") for key in result if key.endswith(" planned")}
        assert numbers == {"step", "build", "main memory"} | ({"push"} if offloads else set()), numbers
        for number in numbers:
            planned, traced = result[f"{number} planned"], result[f"{number} traced"]
            assert abs(planned - traced) <= max(0.1 * traced, SMALL_BYTES), f"{name}, {number}: {result}"
