"""Effect of single changes to the config on a run's memory and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.cluster.plan.dcp import DcpPlan
from slime_like.cluster.plan.demand import Demand, MemoryPlan
from slime_like.cluster.plan.remedies import OFFLOAD_KEYS, may_offload
from slime_like.planner.shapes import ModelShape
from slime_like.planner.trainer_changes import trainer_changes

KEYS = {
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "etp": "parallel.etp",
    "tokens": "parallel.max_tokens_per_rank",
    "recompute": "model.recompute",
    "logits_chunk": "model.logits_chunk",
    "offload": "optim.cpu_offload",
    "distributed_optimizer": "parallel.distributed_optimizer",
}
"""Map from a field of ``TrainerSettings`` to its config key."""
STATIC_STEP = 0.05  # between proposed static fractions


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One or more changed settings, as on the command line, and the memory that is predicted for the changed run."""

    setting: str
    plan: MemoryPlan


def changes(demand: Demand, dcp: DcpPlan) -> Iterator[SettingChange]:
    """Yield each change that is possible in this run, with the memory predicted if only this change is made."""
    shape = demand.shapes.actor
    assert shape is not None, "the memory of an unknown model is not predicted"
    if any(role.name == "trainer" for role in demand.roles):
        for change in trainer_changes(shape, demand.settings):
            if "offload" not in dict(change.values) or demand.hardware is not None:
                setting = change.text(KEYS, "=").replace(f"{KEYS['offload']}=1", f"{KEYS['offload']}=true")
                yield SettingChange(setting, replace(demand, trainer=change.settings).plan())
    offloaded = replace(demand.offload_settings, train=True, rollout=True)
    if demand.engines and demand.hardware is not None and offloaded != demand.offload_settings and may_offload(demand):
        yield SettingChange(OFFLOAD_KEYS, replace(demand, offloads=offloaded).plan())
    if demand.engines:
        for setting, changed_demand in _engine_changes(demand, shape, dcp):
            yield SettingChange(setting, changed_demand.plan())


def _engine_changes(demand: Demand, shape: ModelShape, dcp: DcpPlan) -> Iterator[tuple[str, Demand]]:
    spec, other_engines = demand.engines[0], demand.engines[1:]
    if dcp.largest != spec.dcp:
        yield f"rollout.dcp={dcp.largest}", replace(demand, engines=(replace(spec, dcp=dcp.largest), *other_engines))
    per_node = demand.machine.cpu_count if demand.hardware is None else demand.hardware.gpus
    if (
        len(demand.engines) % (2 * demand.cfg.rollout.num_managers) == 0
        and 2 * spec.tp <= per_node
        and shape.heads % (2 * spec.tp) == 0
    ):
        num_engines = len(demand.engines) // 2
        wider = replace(demand, engines=(replace(spec, tp=2 * spec.tp), *other_engines[: num_engines - 1]))
        yield f"rollout.tp={2 * spec.tp} rollout.num_engines={num_engines}", wider
    if demand.hardware is None:
        return
    if spec.dtype == "bfloat16" and spec.dcp == 1 and spec.sglang.get("kv_cache_dtype", "auto") == "auto":
        options = {**spec.sglang, "kv_cache_dtype": "fp8_e4m3"}
        fp8 = replace(demand, engines=(replace(spec, sglang=options), *other_engines))
        yield "rollout.sglang.kv_cache_dtype=fp8_e4m3", fp8
    static = _largest_static(demand)
    if static is not None:
        yield f"rollout.sglang.mem_fraction_static={static:g}", replace(demand, static=static)


def _largest_static(demand: Demand) -> float | None:
    """Return the largest multiple of ``STATIC_STEP`` below 1 that fits as ``mem_fraction_static``; None if the run never fits."""
    shares = (round(1 - num_steps * STATIC_STEP, 2) for num_steps in range(1, round(1 / STATIC_STEP)))
    plans = ((share, replace(demand, static=share).plan()) for share in shares)
    return next((share for share, plan in plans if plan.needed_bytes <= plan.available), None)
