"""Ray processes of a run: started in a namespace of its own, on loopback unless the user names a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray._private import ray_constants
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.cluster.engine_actor import EngineActor
from slime_like.cluster.plan import Plan
from slime_like.cluster.rollout_actor import RolloutActor
from slime_like.cluster.trainer_worker import TrainerWorker
from slime_like.cluster.wait import wait_one
from slime_like.config.root import TrainConfig
from slime_like.deadline import Deadline
from slime_like.errors import ConfigError

# Set before torch is imported: OpenMP threads that spin while they wait starve the other processes of a small machine.
CPU_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
TRAINER_GPU_SHARE = 0.6  # of a GPU that trainer and engine share; only Ray's bookkeeping reads it
ENGINE_GPU_SHARE = 0.3


class Placement:
    """Starts Ray and the actors, and stops exactly what it started."""

    def __init__(self, cfg: TrainConfig, plan: Plan, stacks_dir: str) -> None:
        self._plan = plan
        self._stacks_dir = stacks_dir
        self._actors: list[Any] = []
        self._bundles: Any = None
        self._connect(cfg)

    def _connect(self, cfg: TrainConfig) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = cfg.placement.ray_address
        if address is not None:
            ray.init(
                address=address, namespace=f"slime_like_{cfg.run.name}", log_to_driver=False, logging_level="error"
            )
        else:
            _stay_on_loopback()
            ray.init(
                address="local",
                namespace=f"slime_like_{cfg.run.name}",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        if self._plan.device == "cuda":
            self._reserve_gpus(cfg.loop.step_deadline_s)

    def _reserve_gpus(self, seconds: float) -> None:
        """One bundle per GPU; a split placement's engines follow the trainer's ranks."""
        needed = self._plan.num_gpus
        self._bundles = placement_group([{"GPU": 1, "CPU": 1}] * needed, strategy="PACK")
        try:
            wait_one(
                f"{needed} free GPUs in the Ray cluster",
                self._bundles.ready(),
                Deadline("driver", "placement", min(seconds, 300)),
            )
        except TimeoutError as error:
            have = ray.cluster_resources().get("GPU", 0)
            raise ConfigError(
                f"the plan needs {needed} GPUs, the Ray cluster has {have:g} (some may be taken): {error}"
            ) from error

    def trainers(self) -> tuple[list[Any], list[int]]:
        """One worker per rank, and each rank's device index in its own process."""
        world = self._plan.actor.layout.world_size
        remote: Any = ray.remote(TrainerWorker)
        share = TRAINER_GPU_SHARE if self._plan.colocated else 1.0
        workers = [
            remote.options(**self._options(rank, share), name=f"trainer_{rank}").remote(rank, world, self._stacks_dir)
            for rank in range(world)
        ]
        self._actors += workers
        return workers, [0] * world

    def engines(self, admin_key: str) -> list[Any]:
        """One actor per engine; the SGLang server is its child and sees the engine's GPUs."""
        remote: Any = ray.remote(EngineActor)
        first = 0 if self._plan.colocated else self._plan.actor.layout.world_size
        actors: list[Any] = []
        for index, spec in enumerate(self._plan.engines):
            share = ENGINE_GPU_SHARE if self._plan.colocated else 1.0
            options = self._options(first + index * spec.tp, share)
            actors.append(
                remote.options(**options, name=f"engine_{index}").remote(
                    f"engine {index}", spec, admin_key, self._stacks_dir
                )
            )
        self._actors += actors
        return actors

    def manager(self) -> Any:
        """The rollout manager."""
        remote: Any = ray.remote(RolloutActor)
        actor = remote.options(num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": CPU_ENV}).remote(
            self._stacks_dir
        )
        self._actors.append(actor)
        return actor

    def _options(self, bundle: int, gpu_share: float) -> dict[str, Any]:
        env = dict(CPU_ENV, OMP_NUM_THREADS=str(self._plan.threads_per_process))
        options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
        if self._plan.device == "cuda":
            options["num_gpus"] = gpu_share
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._bundles, placement_group_bundle_index=bundle
            )
        return options

    def close(self, stop_first: Sequence[tuple[Any, str]]) -> None:
        """Stop: first politely (``(actor, verb)``), then every actor of ours, then the Ray we started or joined."""
        refs = [getattr(actor, verb).remote() for actor, verb in stop_first]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=20)
        for actor in self._actors:
            ray.kill(actor)
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        ray.shutdown()


def _stay_on_loopback() -> None:
    """Make Ray's own servers bind to 127.0.0.1.

    Ray 2.60 replaces a loopback address given to ``ray.init`` by the machine's outward one and then listens on every
    interface. Its constant for machines without clusters is what keeps it on loopback; the environment variable tells
    Ray's daemons the same. Goes when ``ray.init(_node_ip_address="127.0.0.1")`` is honoured.
    """
    assert hasattr(ray_constants, "ENABLE_RAY_CLUSTER"), (
        "ray moved ENABLE_RAY_CLUSTER: find how it binds to loopback now"
    )
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
