"""Trace trainer ranks on a phantom GPU, in a child process of ``train.py --plan --trace`` or ``scripts/compile_kernels.py``.

In ``python -m slime_like.cluster.plan.traced_rank REQUEST RESULT``, REQUEST contains the command line, the described
machine and the choice of kernels; the traces are written to RESULT. Both are JSON files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.machine import described_machine, probe_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.shapes import config_values
from slime_like.config.load.loader import load_config
from slime_like.config.rules.schedule import without_schedule
from slime_like.config.schema.resolved import RankSpec
from slime_like.errors import ConfigError, SlimeLikeError, exit_code
from slime_like.phantom.autotuning import use_first_configs
from slime_like.util.imports import heavy_imports
from slime_like.util.leave import leave


def main(request: Path, result: Path) -> int:
    """Trace the ranks and return the exit code."""
    try:
        arguments: dict[str, Any] = json.loads(request.read_text(encoding="utf-8"))
        if arguments.get("first_configs"):
            use_first_configs()
        out = traces(arguments["argv"], arguments["machine"], own_kernels=bool(arguments.get("own_kernels")))
        result.write_text(json.dumps(out), encoding="utf-8")
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    return 0


def traces(argv: list[str], description: str | None, *, own_kernels: bool = False) -> list[dict[str, Any]]:
    """Trace the first rank of the first pipeline stage and, if there are several stages, the first rank of the last stage.

    With ``own_kernels``, Gated DeltaNet runs on the kernels that the run itself uses, otherwise on torch's. Raises
    ``ConfigError`` if the command line is refused or the model has no config.json yet.
    """
    cfg = load_config(argv, files=False, machine=description is None)
    machine = probe_machine() if description is None else described_machine(description)
    plan = make_plan(without_schedule(cfg), machine)
    values = config_values(cfg)
    if values is None:
        raise ConfigError(
            f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} has no config.json yet: start the run once, so that run.prepare writes it"
        )
    with tempfile.TemporaryDirectory(prefix="slime_like-trace-") as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        spec, note = traceable(plan.actor, folder, own_kernels=own_kernels)
        stages = sorted({0, spec.layout.pp - 1})
        return [{**traced(plan, spec, stage), "note": note} for stage in stages]


def traceable(spec: RankSpec, folder: str, *, own_kernels: bool = False) -> tuple[RankSpec, str]:
    """Return the spec with the model of ``folder``, and a note if the trace uses other kernels than the run, otherwise "".

    Unless ``own_kernels``, Gated DeltaNet runs on torch's kernels, which a phantom GPU accepts.
    """
    model = replace(spec.model, hf_checkpoint=folder, megatron_checkpoint=None, ref_checkpoint=None)
    spec = replace(spec, model=model, teacher_checkpoint=spec.teacher_checkpoint and folder)
    if (
        own_kernels
        or model.gdn.backend == "torch"
        or "linear" not in Path(folder, "config.json").read_text(encoding="utf-8")
    ):
        return spec, ""
    torch_kernels = replace(model, gdn=replace(model.gdn, backend="torch"))
    return replace(spec, model=torch_kernels), "; Gated DeltaNet by torch, which keeps more than the run's kernels"


def traced(plan: Plan, spec: RankSpec, stage: int) -> dict[str, Any]:
    """Return the trace of a stage's first rank, with the number of its micro-batches and the length of their sequences."""
    with heavy_imports():
        from slime_like.train.megatron.trace.memory import TracedBatch, trace_rank

    layout = spec.layout
    demand = plan.memory.demand
    max_micros = 2 * layout.pp if demand is None else min(2 * layout.pp, demand.settings.num_micro_batches or 1)
    num_micros = max(2, max_micros)
    if layout.vpp > 1:  # whole groups of the interleaved schedule
        num_micros = -(-num_micros // layout.pp) * layout.pp
    batch = TracedBatch(min(plan.max_context_len, spec.max_tokens_per_rank * layout.cp), num_micros)
    rank = stage * layout.world_size // layout.pp
    offload = demand is not None and demand.offload_settings.train
    trace = trace_rank(spec, rank, batch, offload=offload)
    return {**asdict(trace), "stage": stage, "num_micro_batches": num_micros, "length": batch.length}


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), Path(sys.argv[2])))
