"""Start of engine actors, by the driver at the start of a run and by the rollout manager during it.

The manager starts an engine after the loss of its node, or for a larger pool. It selects a node by the Ray cluster's current
nodes and free GPUs, and waits for GPUs until ``placement.wait_deadline_s``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes
from slime_like.cluster.workers.calls import call, start_actor
from slime_like.cluster.workers.engine_actor import VISIBLE_DEVICES, EngineActor
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.util.deadline import scale

ENGINE_CALLS = 4  # concurrent: a call may wait for a server to start while others check or stop it
STOP_S = 20.0  # for an engine to stop its processes
PROBE_S = 120.0  # for Ray to start a process in each reserved bundle


class GpuProbe:
    """Short-lived actor in a GPU bundle that identifies the bundle's node and GPU."""

    def location(self) -> tuple[str, str]:
        """Return node id and GPU id."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_accelerator_ids()["GPU"][0])


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy of an actor that runs on this node only."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


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
    )  # addresses; on CPUs, an engine starts there only if there is no other node

    def start(self, index: int, options: Mapping[str, Any], gpus: str = "") -> ActorHandle[EngineActor]:
        """Start the actor of an engine with Ray's ``options``; its server sees ``gpus``, a list of GPU ids of the node."""
        log_path = str(Path(self.spec.log_path).with_name(f"engine_{index}.log"))
        spec = replace(self.spec, seed=self.spec.seed + index, log_path=log_path)
        actor_options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": ENGINE_CALLS, **options}
        if self.restarts:
            actor_options |= {"max_restarts": -1, "max_task_retries": -1}
        env = {**self.env, **({VISIBLE_DEVICES: gpus} if gpus else {})}
        return start_actor(EngineActor, **actor_options)(f"engine {index}", spec, self.admin_key, self.stacks_dir, env)


class EngineStarter:
    """Starter of engines in the rollout manager's process, which also stops the engines that it has started."""

    def __init__(
        self, template: EngineTemplate, actors: Mapping[int, ActorHandle[EngineActor]], hosts: Mapping[int, str]
    ) -> None:
        """``actors`` and ``hosts``: actor and node address of each engine that runs already."""
        self._template = template
        self._hosts = dict(hosts)
        self._actors = dict(actors)
        self._initial_actors = frozenset(actors.values())  # stopped by the driver at the end of the run
        self._groups: dict[int, PlacementGroup] = {}

    async def start(self, index: int) -> ActorHandle[EngineActor]:
        """Start the actor of engine ``index`` on a live node. Raises ``EngineError`` if no node can run it."""
        await self.end(index)
        if self._template.spec.device == "cuda":
            node_id, gpus = await self._reserve(index)
        else:
            node_id, gpus = self._least_loaded(index).node_id, ""
        actor = self._template.start(index, {"scheduling_strategy": on_node(node_id)}, gpus)
        self._actors[index] = actor
        return actor

    async def end(self, index: int) -> None:
        """Stop an engine, and free GPUs that this process has reserved for it."""
        self._hosts.pop(index, None)
        if (actor := self._actors.pop(index, None)) is not None:
            await end_engine(actor)
        if (group := self._groups.pop(index, None)) is not None:
            remove_placement_group(group)

    async def stop(self) -> None:
        """Stop all engines that this process has started."""
        indices = [index for index, actor in self._actors.items() if actor not in self._initial_actors]
        await asyncio.gather(*(self.end(index) for index in indices))

    def _least_loaded(self, index: int) -> ClusterNode:
        """Return the live node with the fewest engines, without trainer ranks if there is one."""
        nodes = [node for node in cluster_nodes(ray.nodes()) if node.num_cpus]
        nodes = [node for node in nodes if node.address not in self._template.trainer_nodes] or nodes
        if not nodes:
            raise EngineError(f"engine {index} cannot be started: the Ray cluster has no node with CPUs")
        load = Counter(self._hosts.values())
        node = min(nodes, key=lambda node: (load[node.address], node.address))
        self._hosts[index] = node.address
        return node

    async def _reserve(self, index: int) -> tuple[str, str]:
        """Reserve the engine's GPUs on one node; return its id and the ids of the GPUs."""
        tp, limit = self._template.spec.tp, self._template.wait_s * scale()
        group = self._groups[index] = placement_group([{"GPU": 1.0, "CPU": 1.0}] * tp, strategy="STRICT_PACK")
        try:
            async with asyncio.timeout(limit):
                await group.ready()
        except TimeoutError as error:
            remove_placement_group(self._groups.pop(index))
            raise EngineError(
                f"engine {index} cannot be started: no node of the Ray cluster had {tp} free GPUs within {limit:.0f} s "
                "(placement.wait_deadline_s)"
            ) from error
        in_bundle = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(tp)]
        probes = [start_actor(GpuProbe, num_cpus=0, num_gpus=1, scheduling_strategy=bundle)() for bundle in in_bundle]
        async with asyncio.timeout(PROBE_S * scale()):
            locations = await asyncio.gather(*(call(probe, GpuProbe.location) for probe in probes))
        for probe in probes:
            ray.kill(probe)
        return locations[0][0], ",".join(sorted((gpu for _, gpu in locations), key=gpu_order))


def gpu_order(gpu: str) -> tuple[int, str]:
    """Return the sort key of a GPU id: a number, or the name of a MIG slice."""
    return (int(gpu), "") if gpu.isdecimal() else (0, gpu)


async def end_engine(actor: ActorHandle[EngineActor]) -> None:
    """Stop an engine's processes and kill its actor. An actor that does not answer is killed without a stop."""
    try:
        async with asyncio.timeout(STOP_S * scale()):
            await call(actor, EngineActor.stop)
    except Exception:  # noqa: BLE001  Ray raises errors of several base classes for a dead actor
        pass
    ray.kill(actor)
