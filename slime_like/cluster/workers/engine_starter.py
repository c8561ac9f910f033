"""Start engine actors: the driver does so at the start of a run, a rollout manager during the run.

The manager starts an engine after the loss of the engine's node, or to enlarge the pool. It selects among the Ray cluster's
current nodes and free GPUs, and waits for GPUs for at most ``placement.wait_deadline_s``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import NODE_ID_LABEL_KEY, PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.cluster.plan.ray_cluster import cluster_nodes
from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.calls import call, start_actor
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_parts import NodeSlot
from slime_like.cluster.workers.engine_process import VISIBLE_DEVICES
from slime_like.cluster.workers.node_affinity import on_node
from slime_like.config.schema.resolved import EngineSpec
from slime_like.data.share import SINGLE, ManagerShare
from slime_like.errors import EngineError
from slime_like.util.counted import counted
from slime_like.util.deadline import scale

ENGINE_CALLS = 4  # concurrent: a call may wait for a server to start while others check or stop it
STOP_S = 20.0  # for an engine to stop its processes
PROBE_S = 120.0  # for Ray to start a process in each reserved bundle


class GpuProbe:
    """Short-lived actor in a GPU bundle that identifies the bundle's node and GPUs."""

    def location(self) -> tuple[str, str]:
        """Return the id of this actor's node and the comma-separated ids of its GPUs."""
        context = ray.get_runtime_context()
        gpus = sorted(map(str, context.get_accelerator_ids()["GPU"]), key=gpu_order)
        return str(context.get_node_id()), ",".join(gpus)


@dataclass(frozen=True, slots=True)
class EngineTemplate:
    """Settings that all engines of a run share."""

    spec: EngineSpec  # spec of engine 0
    admin_key: str
    stacks_dir: str
    env: Mapping[str, str]
    restarts: bool  # Ray restarts an actor that died, while its node lives
    wait_s: float  # for free GPUs
    trainer_nodes: frozenset[str] = (
        frozenset()
    )  # addresses; on CPUs, an engine starts there only if there are too few other nodes
    reserved: tuple[tuple[NodeSlot, ...], ...] = ()
    """Nodes of each engine at the start of the run, whose GPUs stay reserved for the run; empty for engines on one node."""

    def start(
        self,
        index: int,
        options: Mapping[str, Any],
        gpu_ids: str = "",
        other_nodes: Sequence[NodeSlot] = (),
        gpus: tuple[int, ...] = (),
    ) -> ActorHandle[EngineActor]:
        """Start the actor of an engine with Ray's ``options``. If ``gpu_ids`` is not empty, the server sees only these GPUs.

        ``gpu_ids``: comma-separated ids. ``other_nodes``: slots of the engine on nodes other than the first. ``gpus``: see
        ``EngineAddress``.
        """
        log_path = str(Path(self.spec.log_path).with_name(f"engine_{index}.log"))
        spec = replace(self.spec, seed=self.spec.seed + index, log_path=log_path)
        actor_options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": ENGINE_CALLS, **options}
        if self.restarts:
            actor_options |= {"max_restarts": -1, "max_task_retries": -1}
        env = {**self.env, **({VISIBLE_DEVICES: gpu_ids} if gpu_ids else {})}
        start = start_actor(EngineActor, **actor_options)
        return start(f"engine {index}", spec, self.admin_key, self.stacks_dir, env, tuple(other_nodes), gpus)

    def start_on(self, index: int, slots: Sequence[NodeSlot]) -> ActorHandle[EngineActor]:
        """Start an engine on the nodes of ``slots``. The engine's actor and first rank are on the first of these nodes."""
        options = {"scheduling_strategy": on_node(slots[0].node_id)}
        return self.start(index, options, slots[0].gpus, slots[1:])


class EngineStarter:
    """Starter of engines in the rollout manager's process. It also stops the engines that it has started."""

    def __init__(
        self,
        template: EngineTemplate,
        actors: Mapping[int, ActorHandle[EngineActor]],
        hosts: Mapping[int, str],
        share: ManagerShare = SINGLE,
    ) -> None:
        """Take over ``actors``, this manager's engines that are already running, by engine index.

        ``hosts`` contains the node address of every engine of the run, for spreading further engines; it is not updated
        when other managers move engines. The index of ``share`` breaks ties between nodes with equally few engines, so
        that managers that add engines at the same time use different nodes.
        """
        self._template, self._share = template, share
        self._hosts = {index: (host,) for index, host in hosts.items()}
        self._hosts |= {index: tuple(slot.address for slot in slots) for index, slots in enumerate(template.reserved)}
        self._actors = dict(actors)
        self._initial_actors = frozenset(actors.values())  # stopped by the driver at the end of the run
        self._groups: dict[int, PlacementGroup] = {}

    async def start(self, index: int) -> ActorHandle[EngineActor]:
        """Stop engine ``index`` if it has an actor, and start an actor for it on live nodes.

        Wait for missing GPUs for at most ``placement.wait_deadline_s``. Raises ``EngineError`` if too few nodes can run the
        engine, and the errors of ``_reserve``.
        """
        await self.end(index)
        slots = self._remaining_slots(index)
        num_missing = self._template.spec.num_nodes - len(slots)
        if self._template.spec.device == "cuda":
            slots += await self._reserve(index, num_missing, slots) if num_missing else []
        else:
            slots += self._least_loaded(index, num_missing, {slot.address for slot in slots})
        self._hosts[index] = tuple(slot.address for slot in slots)
        actor = self._template.start_on(index, slots)
        self._actors[index] = actor
        return actor

    def _remaining_slots(self, index: int) -> list[NodeSlot]:
        """Return the slots that the engine had at the start of the run, without those on nodes lost since then.

        Engines on one node, and engines added later, have none.
        """
        live = {node.node_id for node in cluster_nodes(ray.nodes())} if index < len(self._template.reserved) else set()
        return [slot for slot in self._template.reserved[index] if slot.node_id in live] if live else []

    async def end(self, index: int) -> None:
        """Stop an engine, and free any GPUs that this process has reserved for it."""
        self._hosts.pop(index, None)
        if (actor := self._actors.pop(index, None)) is not None:
            await end_engine(actor)
        if (group := self._groups.pop(index, None)) is not None:
            remove_placement_group(group)

    async def stop(self) -> None:
        """Stop all engines that this process has started."""
        indices = [index for index, actor in self._actors.items() if actor not in self._initial_actors]
        await asyncio.gather(*(self.end(index) for index in indices))

    def _least_loaded(self, index: int, num_nodes: int, excluded: Set[str]) -> list[NodeSlot]:
        """Return slots on the ``num_nodes`` live nodes with the fewest engines, leaving out the addresses in ``excluded``.

        Nodes with trainer ranks are used only if there are too few others. Raises ``EngineError`` if there are too few nodes.
        """
        nodes = [node for node in cluster_nodes(ray.nodes()) if node.num_cpus and node.address not in excluded]
        preferred = [node for node in nodes if node.address not in self._template.trainer_nodes]
        if len(preferred) >= num_nodes:
            nodes = preferred
        if len(nodes) < num_nodes:
            reason = (
                "the Ray cluster has no node with CPUs"
                if self._template.spec.num_nodes == 1
                else f"it needs {counted(num_nodes, 'more node')} with CPUs, and the Ray cluster has {len(nodes)}"
            )
            raise EngineError(f"engine {index} cannot be started: {reason}")
        load = Counter(host for hosts in self._hosts.values() for host in hosts)
        nodes.sort(key=lambda node: (load[node.address], node.address))
        ties = [node for node in nodes if load[node.address] == load[nodes[0].address]]
        first = self._share.index % max(1, len(ties))
        chosen_nodes = [*ties[first:], *ties[:first], *nodes[len(ties) :]][:num_nodes]
        return [NodeSlot(node.node_id, node.address) for node in chosen_nodes]

    async def _reserve(self, index: int, num_nodes: int, other_slots: Sequence[NodeSlot]) -> list[NodeSlot]:
        """Reserve GPUs for an engine on ``num_nodes`` nodes, other than those of ``other_slots``, which the engine keeps.

        Raises ``EngineError`` if the GPUs are not free within ``placement.wait_deadline_s``, or if a node is lost or does not
        answer.
        """
        spec, limit = self._template.spec, self._template.wait_s * scale()
        size = spec.tp // spec.num_nodes  # GPUs on each node
        bundle: dict[str, float] = {"GPU": size, "CPU": size}
        group = self._groups[index] = spread_group(bundle, num_nodes, [slot.node_id for slot in other_slots])
        try:
            async with asyncio.timeout(limit):
                await group.ready()
        except TimeoutError as error:
            remove_placement_group(self._groups.pop(index))
            adjective = "other " if other_slots else ""
            shortage = (
                f"no {adjective}node of the Ray cluster had {size} free GPUs"
                if num_nodes == 1
                else f"the Ray cluster did not have {num_nodes} {adjective}nodes with {size} free GPUs each"
            )
            raise EngineError(
                f"engine {index} cannot be started: {shortage} within {limit:.0f} s (placement.wait_deadline_s)"
            ) from error
        bundles = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(num_nodes)]
        probes = [start_actor(GpuProbe, num_cpus=0, num_gpus=size, scheduling_strategy=bundle)() for bundle in bundles]
        try:
            async with asyncio.timeout(PROBE_S * scale()):
                locations = await asyncio.gather(*(call(probe, GpuProbe.location) for probe in probes))
        except (TimeoutError, RayError) as error:
            raise EngineError(
                f"engine {index} cannot be started: no answer from its reserved GPUs: {one_line(error)}"
            ) from error
        finally:
            for probe in probes:
                ray.kill(probe)
        addresses = {node.node_id: node.address for node in cluster_nodes(ray.nodes())}
        if lost_nodes := [node_id for node_id, _ in locations if node_id not in addresses]:
            raise EngineError(
                f"engine {index} cannot be started: node {lost_nodes[0]} was lost after its GPUs were reserved"
            )
        return [NodeSlot(node_id, addresses[node_id], gpus) for node_id, gpus in locations]


def spread_group(bundle: dict[str, float], num_nodes: int, excluded: Sequence[str]) -> PlacementGroup:
    """Request a placement group of ``num_nodes`` bundles on different nodes, and return it.

    Nodes with ids in ``excluded`` are not used.
    """
    options: dict[str, Any] = {}
    if excluded:
        options["bundle_label_selector"] = [{NODE_ID_LABEL_KEY: f"!in({','.join(excluded)})"}] * num_nodes
    return placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD", **options)


def gpu_order(gpu: str) -> tuple[int, str]:
    """Return the sort key of a GPU id, which is a number or the name of a MIG slice."""
    return (int(gpu), "") if gpu.isdecimal() else (0, gpu)


async def end_engine(actor: ActorHandle[EngineActor]) -> None:
    """Stop an engine's processes, then kill its actor, even if it has not answered within ``STOP_S``."""
    try:
        async with asyncio.timeout(STOP_S * scale()):
            await call(actor, EngineActor.stop)
    except Exception:  # noqa: BLE001  Ray raises errors of several base classes for a dead actor
        pass
    ray.kill(actor)
