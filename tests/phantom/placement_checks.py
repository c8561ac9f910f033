"""Observations of Ray on four phantom GPUs: GPUs that a run reserves, and those that each of its processes sees."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import ray
from ray._private import utils as ray_utils

from slime_like.cluster.plan.machine import probe_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.start.placement import Placement
from slime_like.cluster.workers.calls import call, start_actor, wait_all
from slime_like.cluster.workers.engine_process import VISIBLE_DEVICES
from slime_like.config.load.loader import load_config
from slime_like.util.deadline import Deadline
from tests.train.ranks import RankWorld

NUM_GPUS = 4
RUN = ("+recipe=quickstart", "placement.device=cuda", "placement.mode=split", "placement.actor_num_gpus_per_node=2")


class VisibleGpus:
    """Actor that reports the GPUs of its process."""

    def __init__(self, env: dict[str, str]) -> None:
        os.environ.update(env)
        if VISIBLE_DEVICES in env:  # as engine_process.prepare_process does
            os.environ["CUDA_VISIBLE_DEVICES"] = env[VISIBLE_DEVICES]

    def numbers(self) -> list[int]:
        """Return the machine's number of each GPU that CUDA's driver lists."""
        cuda, count, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(16)
        cuda.cuDeviceGetCount(ctypes.byref(count))
        return [cuda.cuDeviceGetUuid_v2(uuid, d) or uuid.raw[0] - 17 for d in range(count.value)]


def observe(world: RankWorld, folder: Path) -> dict[str, Any]:
    """Return the GPUs of Ray, of the plan, of two trainer ranks, and of two engines."""
    del world
    assert hasattr(ray_utils, "get_num_cpus"), "ray moved get_num_cpus: find how it counts CPUs"
    ray_utils.get_num_cpus = lambda *_, **__: NUM_GPUS  # a bundle has a CPU for each GPU
    argv = [*RUN, "rollout.num_engines=2", "rollout.tp=1", f"run.dir={folder}"]
    cfg = load_config(argv, files=False)
    plan = make_plan(cfg, probe_machine())
    placement = Placement(cfg, plan, str(folder), lambda line: None)
    try:
        placement.open()
        first = plan.actor.layout.world_size
        actors = {
            f"trainer {rank}": start_actor(VisibleGpus, **placement._trainer_options(rank))({}) for rank in range(first)
        }
        for index in range(len(plan.engines)):
            options, env = placement._shared_options((first + index,), "engine", index)
            actors[f"engine {index}"] = start_actor(VisibleGpus, **options)(env)
        calls = {name: call(actor, VisibleGpus.numbers) for name, actor in actors.items()}
        numbers = wait_all(calls, Deadline("test", "placement", 120))
        return {
            "devices": plan.num_gpus,
            "ray": ray.cluster_resources()["GPU"],
            "reserved": [gpu for _, gpu in placement._gpus],
            "free": ray.available_resources().get("GPU", 0.0),
            **numbers,
        }
    finally:
        placement.close()
