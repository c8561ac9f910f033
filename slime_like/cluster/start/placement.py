"""Start the Ray actors of a run in a separate namespace, on loopback unless the user names a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime_like.cluster.plan.planner import Plan
from slime_like.cluster.plan.ray_cluster import ClusterPlan, plan_on_nodes
from slime_like.cluster.start import local_ray
from slime_like.cluster.supervise import driver_link
from slime_like.cluster.workers.calls import call, start_actor, wait_all, wait_one
from slime_like.cluster.workers.engine_actor import VISIBLE_DEVICES, EngineActor
from slime_like.cluster.workers.role_group import RoleWorker
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.cluster.workers.trainer_worker import TrainerWorker
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline

# Set before torch is imported: OpenMP threads that spin while they wait starve the other processes of a small machine.
# Set by the actors: a Ray runtime_env would wait for Ray's agent and ignore workers that are already started.
CPU_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
STOP_S = 20.0  # for actors to stop their child processes
CLOSE_S = 45.0  # in total; Ray does not return while one of its processes is stopped
ENGINE_CALLS = 4  # concurrent: a call may wait for a server to start while others check or stop it
# Makes cuBLAS and NCCL sum in the same order each time; must be set before they start; GPUs only.
DETERMINISTIC_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


class _GpuProbe:
    """Short-lived actor in a GPU bundle that identifies the bundle's node and GPU."""

    def location(self) -> tuple[str, str]:
        """Return node id and GPU id."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_accelerator_ids()["GPU"][0])


class Placement:
    """Owner of Ray and the actors of a run, which stops only processes that it started."""

    def __init__(self, cfg: TrainConfig, plan: Plan, stacks_dir: str) -> None:
        self._plan = plan
        self._stacks_dir = stacks_dir
        self._logs = Path(cfg.run.dir).resolve() / "logs"
        self._ranks: list[ActorHandle[TrainerWorker] | ActorHandle[RoleWorker]] = []
        self._engines: list[ActorHandle[EngineActor]] = []
        self._manager: ActorHandle[RolloutActor] | None = None
        self._bundles: Any = None
        self._gpus: list[tuple[str, str]] = []  # node id and GPU id of each bundle
        self._cfg = cfg

    def open(self) -> ClusterPlan:
        """Start Ray, or join the cluster that ``placement.ray_address`` names; plan on its nodes, and reserve GPUs."""
        cfg = self._cfg
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address, planned = cfg.placement.ray_address, ClusterPlan(self._plan)
        if address is not None:
            local_ray.join(address, f"slime_like_{cfg.run.name}")
            planned = plan_on_nodes(cfg, self._plan, local_ray.nodes())
            self._plan = planned.plan
        else:
            local_ray.start(f"slime_like_{cfg.run.name}")
        if self._plan.device == "cuda":
            self._reserve_gpus(cfg.loop.step_deadline_s)
        return planned

    @property
    def log_dir(self) -> Path | None:
        """Return Ray's log folder on this node; None before Ray is up."""
        return local_ray.log_dir()

    def _reserve_gpus(self, seconds: float) -> None:
        """Reserve one bundle per GPU; in a split placement, engines follow the trainer's ranks."""
        num_needed = self._plan.num_gpus
        self._bundles = placement_group([{"GPU": 1, "CPU": 1}] * num_needed, strategy="PACK")
        try:
            wait_one(
                f"{num_needed} free GPUs in the Ray cluster",
                self._bundles.ready(),
                Deadline("driver", "placement", min(seconds, 300)),
            )
        except TimeoutError as error:
            have = ray.cluster_resources().get("GPU", 0)
            raise ConfigError(
                f"the plan needs {num_needed} GPUs, the Ray cluster has {have:g} (some may be taken): {error}"
            ) from error

        probes = [
            start_actor(_GpuProbe, num_cpus=0, num_gpus=1, scheduling_strategy=self._in_bundle(i))()
            for i in range(num_needed)
        ]
        gpus = wait_all(
            {f"GPU probe {i}": call(probe, _GpuProbe.location) for i, probe in enumerate(probes)},
            Deadline("driver", "placement", 120),
        )
        self._gpus = list(gpus.values())
        for probe in probes:
            ray.kill(probe)

    def start_trainers(self) -> list[ActorHandle[TrainerWorker]]:
        """Start one worker per rank, which sees one GPU at most."""
        world = self._plan.actor.layout.world_size
        env = self._env(self._plan.trainer_threads)
        workers = [
            start_actor(TrainerWorker, **self._trainer_options(rank))(rank, world, self._stacks_dir, env)
            for rank in range(world)
        ]
        self._ranks += workers
        return workers

    def start_role(self, name: str) -> list[ActorHandle[RoleWorker]]:
        """Start one worker per rank of a critic or teacher; its GPUs may be shared with the actor."""
        devices = next(role.devices for role in self._plan.roles if role.name == name)
        workers: list[ActorHandle[RoleWorker]] = []
        for rank, bundles in enumerate(devices):
            options, visible = self._shared_options(bundles, name)
            env = self._env(self._plan.trainer_threads) | visible
            workers.append(start_actor(RoleWorker, **options)(name, rank, len(devices), self._stacks_dir, env))
        self._ranks += workers
        return workers

    def start_engines(self, admin_key: str) -> list[ActorHandle[EngineActor]]:
        """Start one actor per engine; its child, the SGLang server, sees the engine's GPUs."""
        first = 0 if self._plan.colocated else self._plan.actor.layout.world_size
        actors: list[ActorHandle[EngineActor]] = []
        for index, spec in enumerate(self._plan.engines):
            bundles = range(first + index * spec.tp, first + (index + 1) * spec.tp)
            options, visible = self._shared_options(tuple(bundles), "rollout")
            options |= {"max_concurrency": ENGINE_CALLS}
            if self._cfg.health.on_dead_engine == "restart":  # restarts the actor, not only its server
                options |= {"max_restarts": -1, "max_task_retries": -1}
            env = self._env(self._plan.engine_threads) | visible
            actors.append(
                start_actor(EngineActor, **options)(f"engine {index}", spec, admin_key, self._stacks_dir, env)
            )
        self._engines += actors
        return actors

    def start_manager(self) -> ActorHandle[RolloutActor]:
        """Start the rollout manager."""
        log = self._logs / "rollout_manager.log"
        self._manager = start_actor(RolloutActor, num_cpus=0, max_concurrency=1000)(self._stacks_dir, CPU_ENV, str(log))
        return self._manager

    def _trainer_options(self, rank: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0}
        if self._plan.device == "cuda":
            options |= {"num_gpus": 1, "scheduling_strategy": self._in_bundle(rank)}
        return options

    def _shared_options(self, bundles: tuple[int, ...], group: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return Ray options and environment of an actor on reserved GPUs that it may share, so it requests none from Ray."""
        env: dict[str, str] = {}
        options: dict[str, Any] = {"num_cpus": 0}
        if self._plan.device == "cuda":
            nodes = {self._gpus[i][0] for i in bundles}
            if len(nodes) > 1:
                raise ConfigError(
                    f"{group}.tp={len(bundles)} would spread one engine over {len(nodes)} nodes: lower {group}.tp to at most the GPUs of one node"
                )
            env = {VISIBLE_DEVICES: ",".join(self._gpus[i][1] for i in bundles)}
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(nodes.pop(), soft=False)
        return options, env

    def _env(self, threads: int) -> dict[str, str]:
        fixed_environment = DETERMINISTIC_ENV if self._plan.actor.deterministic else {}
        return CPU_ENV | fixed_environment | {"OMP_NUM_THREADS": str(threads)}

    def _in_bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index)

    def close(self) -> None:
        """Stop rollout manager and engines, then kill every started actor, then shut Ray down."""
        managers = [] if self._manager is None else [self._manager]
        with driver_link.bounded_call(Deadline("driver", "teardown", CLOSE_S), "Ray to end the processes of this run"):
            refs: list[ObjectRef[None]] = [call(manager, RolloutActor.stop) for manager in managers]
            refs += [call(engine, EngineActor.stop) for engine in self._engines]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=STOP_S)
            for actor in (*self._engines, *managers, *self._ranks):
                ray.kill(actor)
            if self._bundles is not None:
                remove_placement_group(self._bundles)
            local_ray.shutdown()
