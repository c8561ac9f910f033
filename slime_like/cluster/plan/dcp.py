"""Plan of decode context parallelism (DCP): group size (``rollout.dcp=auto``) and exchange of partial attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.cluster.plan.admission import KV_CACHE, STATES, EngineLoad
from slime_like.cluster.plan.engine import engine_settings, predict_engine
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions, RoleShapes
from slime_like.config.rules.dcp import device_obstacles, setting_obstacles, state_obstacles
from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.rollout import AUTO
from slime_like.config.schema.root import TrainConfig
from slime_like.planner.engine import EngineMemory, useful_dcp


@dataclass(frozen=True, slots=True)
class DcpPlan:
    """Decode context parallelism of the engines, and the largest size that the run allows."""

    size: int = 1
    exchange: str = "ag_rs"
    largest: int = 1
    largest_tokens: int = 0  # KV capacity of an engine with ``largest``; 0 if it is not predicted

    def applied_to(self, engine: EngineSpec, cfg: TrainConfig) -> EngineSpec:
        """Return ``engine`` with the DCP settings of this plan."""
        replicate = cfg.rollout.dcp_replicate_q and self.size > 1
        return replace(engine, dcp=self.size, dcp_comm=self.exchange, dcp_replicate_q=replicate)


def plan_dcp(
    cfg: TrainConfig,
    machine: Machine,
    model: HfConfig | None,
    shapes: RoleShapes,
    engine: EngineSpec,
    load: EngineLoad,
    decisions: PlanDecisions,
) -> DcpPlan:
    """Resolve ``rollout.dcp`` and ``rollout.dcp_comm``. ``engine`` is an engine whose DCP size is 1.

    For a run that has yet to join a Ray cluster, ``auto`` is taken as 1; ``plan_on_nodes`` decides it later.
    """
    largest, obstacle = _largest(cfg, machine, model, shapes, engine)
    predicted = predict_engine(cfg, machine, shapes, engine)
    wider = predict_engine(cfg, machine, shapes, replace(engine, dcp=largest))
    size = cfg.rollout.dcp
    if isinstance(size, str) and is_undecided(cfg, machine) and largest > 1:
        size = 1
        decisions.add("rollout.dcp", "auto", "chosen for the nodes of the Ray cluster once it responds")
    elif isinstance(size, str):
        size, reason = (1, obstacle) if largest == 1 else _choose(largest, predicted, wider, load)
        decisions.add("rollout.dcp", size, reason)
    exchange = _exchange(cfg, engine.device, size, decisions)
    return DcpPlan(size, exchange, largest, wider.tokens if isinstance(wider, EngineMemory) else 0)


def is_undecided(cfg: TrainConfig, machine: Machine) -> bool:
    """Return True if ``rollout.dcp=auto`` can only be decided once the nodes of a joined Ray cluster are known."""
    return cfg.rollout.dcp == AUTO and cfg.placement.ray_address is not None and machine.is_local


def dcp_lines(plan: DcpPlan, engine: EngineMemory | None, load: EngineLoad) -> Iterator[str]:
    """Yield a line that suggests the largest ``rollout.dcp``.

    Yield nothing unless the KV cache of ``engine`` limits its concurrent requests and that size would enlarge the cache.
    """
    if engine is None or load.limit_on(engine) != KV_CACHE:
        return
    if plan.largest != plan.size and plan.largest_tokens > engine.tokens:
        yield f"  rollout.dcp={plan.largest} would hold {plan.largest_tokens:,} tokens per engine (docs/dcp.md)"


def _largest(
    cfg: TrainConfig, machine: Machine, model: HfConfig | None, shapes: RoleShapes, engine: EngineSpec
) -> tuple[int, str]:
    """Return the largest useful DCP size, and the reason if it is 1.

    A size above 1 is useful if it adds KV capacity, and settings, device and model allow it.
    """
    if shapes.actor is None:
        return 1, f"the KV heads of the model are not known: {shapes.unknown}"
    settings = engine_settings(engine)
    copies, ranks = useful_dcp(shapes.actor, settings), settings.attention_tp
    if copies == 1 or ranks % copies:
        heads = shapes.actor.kv_heads
        return 1, f"KV heads are not replicated: the model has {heads}, and an engine {ranks} attention ranks"
    obstacles = (
        *setting_obstacles(cfg),
        *device_obstacles(cfg, engine.device, model, machine.environment),
        *state_obstacles(cfg, engine.device, model),
    )
    for obstacle in obstacles:
        return 1, f"{obstacle.setting}: {obstacle.reason}"
    return copies, ""


def _choose(
    largest: int, predicted: EngineMemory | str, wider: EngineMemory | str, load: EngineLoad
) -> tuple[int, str]:
    """Return the DCP size and the reason for it.

    The size is ``largest`` if the KV cache limits the concurrent requests of an engine, otherwise 1.
    """
    if isinstance(predicted, str):
        return 1, f"the KV cache is not predicted: {predicted}"
    if isinstance(wider, str):
        return 1, f"the KV cache with {largest} ranks per head is not predicted: {wider}"
    fit, wider_fit = predicted.requests(load.sequence_len), wider.requests(load.sequence_len)
    requests = f"{load.num_requests:,} requests of {load.sequence_len:,} tokens that an engine gets at once"
    limit = load.limit_on(predicted)
    if limit == STATES:
        return 1, f"the recurrent states hold {fit:,} of the {requests}, and DCP does not shard them"
    if limit != KV_CACHE:
        return 1, f"the KV cache holds the {requests}"
    return (
        largest,
        f"without DCP, the KV cache holds {fit:,} of the {requests}; with {largest} ranks per head {wider_fit:,}",
    )


def _exchange(cfg: TrainConfig, device: str, size: int, decisions: PlanDecisions) -> str:
    """Return how ranks that share a KV cache exchange partial attention: ``rollout.dcp_comm`` with ``auto`` resolved."""
    if cfg.rollout.dcp_comm != "auto":
        return cfg.rollout.dcp_comm
    exchange, reason = (
        ("a2a", "one exchange per layer")
        if device == "cpu"
        else ("ag_rs", "every attention backend on GPUs supports it")
    )
    if size > 1:
        decisions.add("rollout.dcp_comm", exchange, reason)
    return exchange
