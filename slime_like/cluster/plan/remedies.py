"""Error messages for a run whose predicted memory does not fit, with single changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime_like.cluster.plan.demand import Demand, MemoryPlan
from slime_like.cluster.plan.engine import engine_settings
from slime_like.config.schema.resolved import EngineSpec
from slime_like.planner.engine import WEIGHT_ITEMS
from slime_like.planner.host import MEMORY_FRACTION
from slime_like.planner.table import gib

OFFLOAD_KEYS = "placement.offload_train=true placement.offload_rollout=true"
SMALLEST_STATIC, LARGEST_STATIC = 0.1, 0.95


def refusal(demand: Demand, plan: MemoryPlan) -> str:
    """Return the error message for a run that does not fit: its memory, and up to three single changes that make it fit."""
    parts = ", ".join(
        f"{role} {gib(table.total)}{f' on {table.place}' * bool(table.place)}" for role, table in plan.peak.tables
    )
    worst = max(plan.peak.tables, key=lambda pair: pair[1].total)
    phase = f" in phase {plan.peak.name}" if plan.peak.name else ""
    largest = sorted(worst[1].items, key=lambda item: -item.num_bytes)[:2]
    detail = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in largest)
    fixes = [key for key, changed_demand in _remedies(demand, plan) if _fits(changed_demand)]
    advice = f"set {' or '.join(fixes[:3])}" if fixes else "use more or larger GPUs, or raise parallel.tp, pp or ep"
    return (
        f"the run needs {gib(plan.needed_bytes)} on a GPU{phase} ({parts}; the {worst[0]}'s {detail}), but each {plan.gpu} has "
        f"{gib(plan.available)}: {advice} (docs/planner.md)"
    )


def _fits(demand: Demand) -> bool:
    plan = demand.plan()
    return plan.needed_bytes <= plan.available and not engine_is_too_small(demand, plan)


def engine_is_too_small(demand: Demand, plan: MemoryPlan) -> bool:
    """Return True if the run has an engine that does not start or whose KV cache holds no sequence of the context length."""
    engine = plan.engine
    return engine is not None and (engine.pool <= 0 or engine.requests(demand.engines[0].context_length) < 1)


def _starts(demand: Demand) -> bool:
    plan = demand.plan()
    return plan.min_bytes <= plan.available and not engine_is_too_small(demand, plan)


def engine_refusal(demand: Demand, plan: MemoryPlan) -> str:
    """Return the error message for an engine that cannot hold one sequence, with the changes that make it fit."""
    assert plan.engine is not None, "an engine is too small"
    spec = demand.engines[0]
    if not engine_is_too_small(without_limit := _without_limit(demand), without_limit.plan()):
        return _limit_refusal(spec)
    weights, pool = plan.engine.table.of(*WEIGHT_ITEMS), plan.engine.pool
    fixes = [key for key, _ in _engine_remedies(demand)]
    advice = f"set {' or '.join(fixes)}" if fixes else "raise rollout.tp, or use more or larger GPUs"
    if pool <= 0:
        problem = f"its share of a GPU of {gib(plan.available)} is {gib(weights + pool)}, less than its weights"
    else:
        problem = f"its KV cache of {plan.engine.tokens:,} tokens holds no sequence of {spec.context_length:,} tokens"
    return (
        f"an engine with rollout.tp={spec.tp} has {gib(weights)} of weights on each {plan.gpu}, and {problem}: "
        f"{advice} (docs/planner.md)"
    )


def _without_limit(demand: Demand) -> Demand:
    """Return ``demand`` without ``max_total_tokens`` in the settings of its first engine."""
    spec = demand.engines[0]
    options = {field: value for field, value in spec.sglang.items() if field != "max_total_tokens"}
    return replace(demand, engines=(replace(spec, sglang=options), *demand.engines[1:]))


def _limit_refusal(spec: EngineSpec) -> str:
    """Return the error message for an engine with enough memory for a sequence, but too small a ``max_total_tokens``."""
    ranks = f" on each of {spec.dcp} ranks (rollout.dcp)" * (spec.dcp > 1)
    return (
        f"rollout.sglang.max_total_tokens={spec.sglang['max_total_tokens']} limits the KV cache to that many tokens{ranks}, "
        f"which hold no sequence of {spec.context_length:,} tokens (rollout.max_context_len): set "
        f"rollout.sglang.max_total_tokens={-(-spec.context_length // spec.dcp)} or more, or remove rollout.sglang.max_total_tokens "
        "(docs/planner.md)"
    )


def host_engine_refusal(demand: Demand, plan: MemoryPlan) -> str:
    """Return an error message if a CPU engine's ``mem_fraction_static`` leaves a KV cache smaller than a sequence, else "".

    A small KV cache is accepted if a larger fraction would not enlarge it, for example because of ``max_total_tokens``.
    """
    larger_plan = replace(demand, static=LARGEST_STATIC).plan()
    if (
        not engine_is_too_small(demand, plan)
        or plan.engine is None
        or larger_plan.engine is None
        or larger_plan.engine.tokens <= plan.engine.tokens
    ):
        return ""
    spec = demand.engines[0]
    statics = (percent / 100 for percent in range(10, 100, 5))
    static = next(
        (share for share in statics if not engine_is_too_small(demand, replace(demand, static=share).plan())), None
    )
    advice = "use a smaller model or a machine with more memory"
    if static is not None:
        advice = f"set rollout.sglang.mem_fraction_static={static:g}"
    return (
        f"an engine has mem_fraction_static={engine_settings(spec).static or MEMORY_FRACTION:g} of {gib(plan.available)} of main "
        f"memory for {gib(plan.engine.table.of('weights'))} of weights and its KV cache, which holds {plan.engine.tokens:,} "
        f"tokens, less than a sequence of {spec.context_length:,}: {advice} (docs/planner.md)"
    )


def _engine_remedies(demand: Demand) -> Iterator[tuple[str, Demand]]:
    """Yield changes that each let an engine start, if there are any.

    They are the smallest sufficient static fraction, in steps of 0.05, and the fewest sufficient doublings of ``rollout.tp``.
    """
    statics = (percent / 100 for percent in range(10, 95, 5))
    changes = ((f"rollout.sglang.mem_fraction_static={share:g}", replace(demand, static=share)) for share in statics)
    yield from next(([change] for change in changes if _starts(change[1])), [])
    assert demand.shapes.actor is not None and demand.hardware is not None, "a run on GPUs with a known model"
    spec, heads = demand.engines[0], demand.shapes.actor.heads
    tp = 2 * spec.tp
    while tp <= demand.hardware.gpus and heads % tp == 0:
        wider = replace(demand, engines=(replace(spec, tp=tp), *demand.engines[1:]))
        if _starts(wider):
            yield f"rollout.tp={tp}", wider
            return
        tp *= 2


def _remedies(demand: Demand, plan: MemoryPlan) -> Iterator[tuple[str, Demand]]:
    """Yield changes, as on the command line, that may make the run fit, least costly first."""
    settings = demand.settings
    shares_gpus = "engine" in plan.busiest and "trainer" in plan.busiest
    if "engine" in plan.busiest and plan.engine is not None:
        excess = plan.needed_bytes - plan.available
        current = plan.engine.pool + plan.engine.table.of(*WEIGHT_ITEMS)
        static = int(20 * (current - excess) / plan.available) / 20
        if static >= SMALLEST_STATIC:
            yield f"rollout.sglang.mem_fraction_static={static:g}", replace(demand, static=static)
    if "trainer" in plan.busiest:
        if settings.recompute != "full":
            yield "model.recompute=full", replace(demand, trainer=replace(settings, recompute="full"))
        if settings.offload < 1 and settings.dtype == "bfloat16":
            yield "optim.cpu_offload=true", replace(demand, trainer=replace(settings, offload=1.0))
        longest = demand.engines[0].context_length if demand.engines else 0
        for tokens in (settings.tokens // 2, settings.tokens // 4):
            if tokens >= min(longest, settings.tokens):
                change = replace(settings, tokens=tokens)
                yield f"parallel.max_tokens_per_rank={tokens}", replace(demand, trainer=change)
    offloaded = replace(demand.offload_settings, train=True, rollout=True)
    if shares_gpus and offloaded != demand.offload_settings and may_offload(demand):
        yield OFFLOAD_KEYS, replace(demand, offloads=offloaded)
    hardware = demand.hardware
    separate = _num_devices(demand, "trainer") + _num_devices(demand, "engine")
    if shares_gpus and hardware is not None and separate <= hardware.num_gpus:
        roles = tuple(role for role in demand.roles if role.name != "engine")
        yield "placement.mode=split", replace(demand, roles=roles)


def may_offload(demand: Demand) -> bool:
    """Return True if trainer and engines of this run could release their memory for each other."""
    cfg = demand.cfg
    flow, remote = cfg.rollout.flow_mla, cfg.rollout.remote_experts
    is_mapped = flow.enabled and flow.transport == "p2p"
    waits = cfg.health.on_stalled_engine == "wait"
    return cfg.run.mode == "full" and cfg.placement.mode == "colocated" and not (remote.enabled or is_mapped or waits)


def _num_devices(demand: Demand, name: str) -> int:
    return sum(len(devices) for role in demand.roles if role.name == name for devices in role.devices)
