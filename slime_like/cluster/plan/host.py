"""Host memory per node of a run on GPUs: processes, offloaded state, copies of weights, checkpoints and remote experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime_like.cluster.plan.demand import Demand
from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.machine import Machine
from slime_like.config.schema.resolved import RankSpec
from slime_like.errors import ConfigError
from slime_like.planner import constants
from slime_like.planner.host import remote_items
from slime_like.planner.offload import offload_items
from slime_like.planner.shapes import ModelShape
from slime_like.planner.table import Item, MemoryTable, gib, items
from slime_like.planner.trainer import SCORING, VALUE, TrainerSettings


def node_memory(demand: Demand, machine: Machine) -> MemoryTable:
    """Return the host memory that the run needs on one node if its processes are spread evenly over the nodes."""
    sums: dict[str, Item] = {}
    for table, count in _processes(demand):
        for item in table.items:
            before = sums[item.name].num_bytes if item.name in sums else 0.0
            sums[item.name] = Item(item.name, before + count * item.num_bytes / machine.nodes, item.note)
    return MemoryTable(tuple(sums.values()))


def check_node_memory(demand: Demand, machine: Machine, table: MemoryTable) -> None:
    """Raise ``ConfigError`` if a node's main memory is too small. Machines of ``--plan-for`` have unlimited main memory."""
    if table.total <= machine.memory_bytes:
        return
    largest = sorted(table.items, key=lambda item: -item.num_bytes)[:2]
    detail = ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in largest)
    raise ConfigError(
        f"the run needs {gib(table.total)} of main memory on a node ({detail}), but it has {gib(machine.memory_bytes)}: "
        f"{_remedy(demand, machine, table)} (docs/planner.md)"
    )


def _remedy(demand: Demand, machine: Machine, table: MemoryTable) -> str:
    """Return a hint: a lower ``optim.cpu_offload_fraction`` that fits node and GPU, otherwise other changes that may help."""
    for percent in range(int(100 * demand.settings.offload) - 5, -1, -5):
        changed_demand = replace(demand, trainer=replace(demand.settings, offload=percent / 100))
        plan = changed_demand.plan()
        if node_memory(changed_demand, machine).total <= machine.memory_bytes and plan.needed_bytes <= plan.available:
            return f"set optim.cpu_offload_fraction={percent / 100:g}" if percent else "set optim.cpu_offload=false"
    copies, remote = table.of("copies of weights"), table.of("remote experts", "copy of remote experts")
    if copies > remote:
        return "train without a reference and a swapped teacher (algo.*, teacher.placement), or use more nodes"
    if remote:
        return "make fewer experts remote (rollout.remote_experts), lower rollout.num_engines, or use nodes with more memory"
    return "lower rollout.num_engines, or use more nodes, or nodes with more memory"


def actor_host_memory(demand: Demand, shape: ModelShape, stage: int | None = None) -> MemoryTable:
    """Return the host memory of one actor rank in pipeline stage ``stage``, or the mean over all stages if it is None."""
    return _rank(shape, demand.settings, demand.actor, demand.offload_settings.train, stage)


def _processes(demand: Demand) -> Iterator[tuple[MemoryTable, int]]:
    """Yield (host memory of one rank, number of ranks) for each role, then (host memory of one engine, number of engines).

    An engine's memory is that of all its processes. Roles whose model is unknown are left out.
    """
    counts = {role.name: len(role.devices) for role in demand.roles}
    shapes, (critic, teacher) = demand.shapes, demand.role_specs
    assert shapes.actor is not None, "the memory of an unknown model is not predicted"
    offloads = demand.offload_settings.train
    if "trainer" in counts:
        yield actor_host_memory(demand, shapes.actor), counts["trainer"]
    if critic is not None and shapes.critic is not None:
        yield _rank(shapes.critic, demand.role_settings(critic.rank, VALUE), None, offloads), counts["critic"]
    if teacher is not None and shapes.teacher is not None:
        yield _rank(shapes.teacher, demand.role_settings(teacher.rank, SCORING), None, offloads), counts["teacher"]
    if demand.engines:
        server = constants.HOST_SERVER.value + constants.HOST_DETOKENIZER.value
        schedulers = demand.engines[0].tp * constants.HOST_SCHEDULER.value
        processes = items(("engines", server + schedulers, "servers, detokenizers and schedulers"))
        remote = remote_items(shapes.actor, engine_settings(demand.engines[0]))
        yield MemoryTable((*processes, *remote)), len(demand.engines)


def _rank(
    shape: ModelShape, settings: TrainerSettings, actor: RankSpec | None, offloads: bool, stage: int | None = None
) -> MemoryTable:
    copies = 0 if actor is None else actor.needs_reference + actor.swaps_teacher
    copies += bool(copies)  # the actor's own weights during a swap
    return offload_items(shape, settings, copies, in_rollouts=offloads, stage=stage)
