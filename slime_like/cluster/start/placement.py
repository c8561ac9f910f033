"""Start the Ray actors of a run in a separate namespace, on loopback unless the user names a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.cluster.plan.assignment import Assignment, assign
from slime_like.cluster.plan.engine_nodes import on_nodes
from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, ClusterPlan, plan_on_nodes
from slime_like.cluster.plan.transport import transport_on_nodes
from slime_like.cluster.run.rollouts import ManagerGroup
from slime_like.cluster.start import local_ray
from slime_like.cluster.start.node_request import NodeRequest, request_bundles, request_strategy
from slime_like.cluster.supervise import driver_link
from slime_like.cluster.workers.calls import call, start_actor, wait_all, wait_one
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_parts import NodeSlot
from slime_like.cluster.workers.engine_process import VISIBLE_DEVICES
from slime_like.cluster.workers.engine_starter import EngineTemplate, GpuProbe, gpu_order
from slime_like.cluster.workers.node_affinity import on_node
from slime_like.cluster.workers.role_group import RoleWorker
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.cluster.workers.trainer_worker import TrainerWorker
from slime_like.config.schema.root import TrainConfig
from slime_like.data.share import ManagerShare
from slime_like.errors import ConfigError, MissingResources
from slime_like.util.deadline import Deadline, scale

# Set before torch is imported: OpenMP threads that spin while they wait starve the other processes of a small machine.
# Set by the actors: a Ray runtime_env would wait for Ray's agent and would not reach workers that have already started.
CPU_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
STOP_S = 20.0  # for actors to stop their child processes
CLOSE_S = 45.0  # in total; Ray does not return while one of its processes is suspended (SIGSTOP)
PIN = 0.001  # amount of the resource node:ADDRESS that ties a bundle to that node
REQUEST_S = 30.0  # for Ray to answer a request for nodes
POLL_S = 1.0  # between two checks of a cluster that lacks nodes or GPUs
SAY_S = 10.0  # between two log lines about such a cluster
# Makes cuBLAS and NCCL sum in the same order each time; must be set before they start; GPUs only.
DETERMINISTIC_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def in_order(locations: Sequence[tuple[str, str]]) -> list[int]:
    """Return the index of the bundle for each GPU of the plan, so that adjacent ranks are on adjacent GPUs.

    Ray assigns the GPUs of a node to bundles in arbitrary order. Only bundles on the same node trade places, so that they are
    in the order of their GPUs. ``locations`` contains the node id and GPU id of each bundle.
    """
    order = list(range(len(locations)))
    for node in {node for node, _ in locations}:
        positions = [i for i, (bundle_node, _) in enumerate(locations) if bundle_node == node]
        by_gpu = sorted(positions, key=lambda i: gpu_order(locations[i][1]))
        for position, bundle in zip(positions, by_gpu, strict=True):
            order[position] = bundle
    return order


class Placement:
    """Owner of Ray and the actors of a run. It stops only processes that it started."""

    def __init__(self, cfg: TrainConfig, plan: Plan, stacks_dir: str, say: Callable[[str], None]) -> None:
        """Store the arguments; ``open`` starts Ray. ``say`` prints a line."""
        self._plan = plan
        self._say = say
        self._assignment = Assignment()
        self._stacks_dir = stacks_dir
        self._logs = Path(cfg.run.dir).resolve() / "logs"
        self._ranks: list[ActorHandle[TrainerWorker] | ActorHandle[RoleWorker]] = []
        self._engines: list[ActorHandle[EngineActor]] = []
        self._managers: list[ActorHandle[RolloutActor]] = []
        self._bundles: Any = None
        self._order: list[int] = []  # bundle of each GPU of the plan
        self._gpus: list[tuple[str, str]] = []  # node id and GPU id of each GPU of the plan
        self._cfg = cfg

    def open(self) -> ClusterPlan:
        """Start Ray, or join the cluster that ``placement.ray_address`` names and adapt the plan to it; reserve the GPUs.

        Return the plan. Raises ``MissingResources`` or ``ConfigError`` if the run's nodes or GPUs are not free in time,
        ``ConfigError`` if the plan does not fit the nodes, and the errors of ``start`` and ``join`` in ``local_ray`` and of
        ``wait_all``.
        """
        cfg = self._cfg
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address, cluster_plan = cfg.placement.ray_address, ClusterPlan(self._plan)
        if address is not None:
            local_ray.join(address, f"slime_like_{cfg.run.name}")
            cluster_plan, self._assignment = self._plan_on_nodes()
            if warning := local_ray.open_cluster_warning(address):
                cluster_plan = replace(cluster_plan, warnings=(*cluster_plan.warnings, warning))
            self._plan = cluster_plan.plan
        else:
            local_ray.start(f"slime_like_{cfg.run.name}")
        if self._plan.device == "cuda":
            self._reserve_gpus()
        return cluster_plan

    def _plan_on_nodes(self) -> tuple[ClusterPlan, Assignment]:
        """Wait for the nodes and GPUs of the run; return the plan for these nodes and the assignment of processes to them.

        Raises ``MissingResources`` if they are not available in time, or ``ConfigError`` if the plan does not fit them.
        """
        cfg = self._cfg
        request = NodeRequest(request_strategy(self._plan))
        try:
            assignment, nodes = self._assign_nodes(request)
        finally:
            with driver_link.bounded_call(Deadline("driver", "placement", REQUEST_S), "its Ray cluster", at_once=True):
                request.withdraw()
        self._say(f"nodes: {assignment.summary}")
        num_nodes = assignment.nodes_per_engine
        transport = transport_on_nodes(cfg, self._plan.transport, num_nodes)
        if transport != self._plan.transport:
            self._say(f"weights.transport={transport.kind}: each engine is on {num_nodes} nodes")
        plan = replace(self._plan, engines=on_nodes(self._plan.engines, num_nodes), transport=transport)
        return plan_on_nodes(cfg, plan, assignment.used(nodes)), assignment

    def _assign_nodes(self, request: NodeRequest) -> tuple[Assignment, tuple[ClusterNode, ...]]:
        """Assign the processes to the cluster's nodes; return the assignment and all nodes.

        If nodes are missing, request them and wait for them. Raises ``MissingResources`` if nodes are still missing
        after ``placement.wait_deadline_s``.
        """
        cfg = self._cfg
        deadline, said_at = Deadline("driver", "placement", cfg.placement.wait_deadline_s), -SAY_S
        while True:
            nodes = local_ray.nodes()
            try:
                return assign(cfg, self._plan, nodes), nodes
            except MissingResources as error:
                if deadline.elapsed() > deadline.limit:
                    raise MissingResources(f"{error} (placement.wait_deadline_s={deadline.seconds:g})") from error
                if deadline.elapsed() - said_at >= SAY_S:
                    said_at = deadline.elapsed()
                    self._say(f"waiting for the Ray cluster, at most {deadline.limit - said_at:.0f} s more: {error}")
            with driver_link.bounded_call(Deadline("driver", "placement", REQUEST_S), "its Ray cluster", at_once=True):
                request.renew(request_bundles(cfg, self._plan, nodes))
                time.sleep(POLL_S)

    @property
    def log_dir(self) -> Path | None:
        """Return Ray's log folder on this node, even after a failed start; None if there is none."""
        return local_ray.log_dir()

    def _reserve_gpus(self) -> None:
        """Reserve one bundle per GPU of the plan; in a joined cluster, on the node to which the GPU is assigned.

        Raises ``ConfigError`` if the GPUs are not free within ``placement.wait_deadline_s``.
        """
        num_needed, nodes = self._plan.num_gpus, self._assignment.gpus
        bundle = {"GPU": 1.0, "CPU": 1.0}
        bundles = [bundle | {f"node:{node.address}": PIN} for node in nodes] or [bundle] * num_needed
        self._bundles = placement_group(bundles, strategy="PACK")
        try:
            wait_one(
                f"{num_needed} free GPUs in the Ray cluster",
                self._bundles.ready(),
                Deadline("driver", "placement", self._cfg.placement.wait_deadline_s),
            )
        except TimeoutError as error:
            num_gpus = ray.cluster_resources().get("GPU", 0)
            raise ConfigError(
                f"the plan needs {num_needed} GPUs, the Ray cluster has {num_gpus:g} (some may be taken): {error}"
            ) from error

        probes = [
            start_actor(GpuProbe, num_cpus=0, num_gpus=1, scheduling_strategy=self._in_bundle(i))()
            for i in range(num_needed)
        ]
        gpus = wait_all(
            {f"GPU probe {i}": call(probe, GpuProbe.location) for i, probe in enumerate(probes)},
            Deadline("driver", "placement", 120),
        )
        self._order = in_order(list(gpus.values()))
        self._gpus = [list(gpus.values())[bundle] for bundle in self._order]
        for probe in probes:
            ray.kill(probe)

    def start_trainers(self) -> list[ActorHandle[TrainerWorker]]:
        """Start one worker per rank of the actor. Each sees at most one GPU."""
        world = self._plan.actor.layout.world_size
        env = self._env(self._plan.trainer_threads)
        workers = [
            start_actor(TrainerWorker, **self._trainer_options(rank))(rank, world, self._stacks_dir, env)
            for rank in range(world)
        ]
        self._ranks += workers
        return workers

    def start_role(self, name: str) -> list[ActorHandle[RoleWorker]]:
        """Start one worker per rank of a critic or teacher. They may share GPUs with the actor."""
        devices = next(role.devices for role in self._plan.roles if role.name == name)
        workers: list[ActorHandle[RoleWorker]] = []
        for rank, bundles in enumerate(devices):
            options, visible = self._shared_options(bundles, name, rank)
            env = self._env(self._plan.trainer_threads) | visible
            workers.append(start_actor(RoleWorker, **options)(name, rank, len(devices), self._stacks_dir, env))
        self._ranks += workers
        return workers

    def engine_template(self, admin_key: str) -> EngineTemplate:
        """Return the settings that all engines of the run share."""
        split = not self._plan.colocated and self._assignment.processes is not None
        trainers = self._assignment.processes["trainer"] if split and self._assignment.processes else ()
        return EngineTemplate(
            spec=self._plan.engines[0],
            admin_key=admin_key,
            stacks_dir=self._stacks_dir,
            env=self._env(self._plan.engine_threads),
            restarts=self._cfg.health.on_dead_engine == "restart",
            wait_s=self._cfg.placement.wait_deadline_s,
            trainer_nodes=frozenset(node.address for node in trainers),
            reserved=self._engine_slots() if self._assignment.nodes_per_engine > 1 else (),
        )

    def _engine_slots(self) -> tuple[tuple[NodeSlot, ...], ...]:
        """Return the slots of each engine: the node and the GPUs of each of its parts."""
        num_nodes, assigned = self._assignment.nodes_per_engine, self._assignment
        if assigned.processes is not None:
            slots = [NodeSlot(node.node_id, node.address) for node in assigned.processes["engine"]]
        else:
            size = self._plan.engines[0].tp // num_nodes
            devices = [gpus for role in self._plan.roles if role.name == "engine" for gpus in role.devices]
            parts = [gpus[begin : begin + size] for gpus in devices for begin in range(0, len(gpus), size)]
            slots = [
                NodeSlot(
                    self._gpus[part[0]][0], assigned.gpus[part[0]].address, ",".join(self._gpus[i][1] for i in part)
                )
                for part in parts
            ]
        return tuple(tuple(slots[begin : begin + num_nodes]) for begin in range(0, len(slots), num_nodes))

    def start_engines(self, template: EngineTemplate) -> list[ActorHandle[EngineActor]]:
        """Start one actor per engine. Its child, the SGLang server, sees the engine's GPUs on the actor's node."""
        first = 0 if self._plan.colocated else self._plan.actor.layout.world_size
        actors: list[ActorHandle[EngineActor]] = []
        for index, spec in enumerate(self._plan.engines):
            if template.reserved:
                actors.append(template.start_on(index, template.reserved[index]))
                continue
            gpus = tuple(range(first + index * spec.tp, first + (index + 1) * spec.tp))
            options, visible = self._shared_options(gpus, "engine", index)
            trainer_gpus = gpus if self._plan.colocated and self._plan.device == "cuda" else ()
            actors.append(template.start(index, options, visible.get(VISIBLE_DEVICES, ""), gpus=trainer_gpus))
        self._engines += actors
        return actors

    def start_managers(self) -> ManagerGroup:
        """Start the rollout managers on the driver's node."""
        local_node = on_node(ray.get_runtime_context().get_node_id())  # managers read the driver's files
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": local_node}
        num_managers = self._cfg.rollout.num_managers
        for file_name in (ManagerShare(index, num_managers).file_name for index in range(num_managers)):
            log = str(self._logs / f"{file_name}.log")
            self._managers.append(start_actor(RolloutActor, **options)(self._stacks_dir, CPU_ENV, log, file_name))
        return ManagerGroup(tuple(self._managers))

    def _trainer_options(self, rank: int) -> dict[str, Any]:
        options = self._on_node("trainer", rank)
        if self._plan.device == "cuda":
            options |= {"num_gpus": 1, "scheduling_strategy": self._in_bundle(rank)}
        return options

    def _on_node(self, role: str, index: int) -> dict[str, Any]:
        """Return Ray options for process ``index`` of a role. On CPUs of a joined cluster, they tie the process to its node."""
        options: dict[str, Any] = {"num_cpus": 0}
        if self._assignment.processes is not None:
            options["scheduling_strategy"] = on_node(self._assignment.processes[role][index].node_id)
        return options

    def _shared_options(self, bundles: tuple[int, ...], role: str, index: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Return Ray options and environment of an actor on CPUs, or on GPUs that the run has reserved.

        The actor requests no GPUs from Ray, because it may share them with another actor. Raises ``ConfigError`` if the GPUs
        are on several nodes.
        """
        env: dict[str, str] = {}
        options = self._on_node(role, index)
        if self._plan.device == "cuda":
            nodes = {self._gpus[i][0] for i in bundles}
            if len(nodes) > 1:
                raise ConfigError(
                    f"{role} {index} would be spread over {len(nodes)} nodes: lower {role}.tp to at most the GPUs of one node"
                )
            env = {VISIBLE_DEVICES: ",".join(self._gpus[i][1] for i in bundles)}
            options["scheduling_strategy"] = on_node(nodes.pop())
        return options, env

    def _env(self, threads: int) -> dict[str, str]:
        fixed_environment = DETERMINISTIC_ENV if self._plan.actor.deterministic else {}
        return CPU_ENV | fixed_environment | {"OMP_NUM_THREADS": str(threads)}

    def _in_bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self._bundles, placement_group_bundle_index=self._order[index] if self._order else index
        )

    def close(self) -> None:
        """Stop managers and engines, then kill every started actor, then shut Ray down or leave the joined cluster."""
        with driver_link.bounded_call(Deadline("driver", "teardown", CLOSE_S), "Ray to end the processes of this run"):
            refs: list[ObjectRef[None]] = [call(manager, RolloutActor.stop) for manager in self._managers]
            refs += [call(engine, EngineActor.stop) for engine in self._engines]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=STOP_S * scale())
            for actor in (*self._engines, *self._managers, *self._ranks):
                ray.kill(actor)
            if self._bundles is not None:
                remove_placement_group(self._bundles)
            local_ray.shutdown()
