"""Predict a run's memory on GPUs or on a CPU, and reject a run that cannot fit."""

from __future__ import annotations

from dataclasses import replace

from slime_like.cluster.plan.demand import Demand, MemoryPlan
from slime_like.cluster.plan.engine import known_hardware
from slime_like.cluster.plan.host import check_node_memory, node_memory
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.remedies import engine_is_too_small, engine_refusal, host_engine_refusal, refusal
from slime_like.cluster.plan.types import Role, RoleShapes
from slime_like.config.schema.resolved import CriticSpec, EngineSpec, RankSpec, TeacherSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.table import gib


def plan_memory(
    cfg: TrainConfig,
    machine: Machine,
    shapes: RoleShapes,
    actor: RankSpec,
    engines: tuple[EngineSpec, ...],
    roles: tuple[Role, ...],
    role_specs: tuple[CriticSpec | None, TeacherSpec | None],
) -> MemoryPlan:
    """Predict the memory of a run.

    If the model or the GPUs are not known, the result contains only the reason. Raises ``ConfigError`` naming the keys to
    change if a GPU, a node or an engine's KV cache is too small.
    """
    if shapes.actor is None:
        return MemoryPlan(unknown=shapes.unknown)
    if actor.device != "cuda":
        demand = Demand(cfg, shapes, actor, engines, roles, role_specs, machine)
        plan = replace(demand.plan(), demand=demand)
        if cfg.placement.ray_address is not None:  # the engines may be on other machines
            return plan
        if message := host_engine_refusal(demand, plan):
            raise ConfigError(message)
        return replace(plan, warning=_host_warning(plan))
    hardware = known_hardware(cfg, machine, shapes)
    if isinstance(hardware, str):
        return MemoryPlan(unknown=hardware, warning="" if machine.is_local else f"memory is not checked: {hardware}")
    demand = Demand(cfg, shapes, actor, engines, roles, role_specs, machine, hardware)
    plan = replace(demand.plan(), demand=demand, source=_source(machine))
    if plan.min_bytes > plan.available:
        raise ConfigError(refusal(demand, plan))
    if engine_is_too_small(demand, plan):
        raise ConfigError(engine_refusal(demand, plan))
    host = node_memory(demand, machine)
    check_node_memory(demand, machine, host)
    warning = refusal(demand, plan) if plan.needed_bytes > plan.available else ""
    return replace(plan, host=host, warning=warning)


def _host_warning(plan: MemoryPlan) -> str:
    """Return a warning if the processes may need more than this machine's main memory, otherwise an empty string.

    It is for a run on a CPU. Memory that several processes share is counted in each of them.
    """
    total = plan.by_role.total
    if total <= plan.available:
        return ""
    parts = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in plan.by_role.items)
    return (
        f"the processes may need {gib(total)} of memory ({parts}), but this machine has {gib(plan.available)}: lower "
        "rollout.num_engines, rollout.tp or the trainer's ranks (docs/planner.md)"
    )


def _source(machine: Machine) -> str:
    """Return a note if the memory size of this machine's GPUs is from the planner's table; else an empty string."""
    return "" if machine.gpu_bytes or not machine.is_local else "memory from the planner's table, not from the driver"
