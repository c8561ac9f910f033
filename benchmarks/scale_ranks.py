"""Trainer ranks without models for ``benchmarks/scale.py``: Ray actors that answer the driver's calls of a step and of a push."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import psutil
from ray.actor import ActorHandle

from benchmarks.scale_engines import cpu_seconds, median
from benchmarks.scale_rank import MANIFEST, SimulatedRank
from slime_like.batch import PackedBatch, StepBatch, TrainBatch
from slime_like.cluster.start import local_ray
from slime_like.cluster.workers.calls import call, start_actor, wait_all
from slime_like.cluster.workers.trainer_group import TrainerGroup, connect
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.resolved import Layout, RankSpec, TransportSpec
from slime_like.interfaces import EngineAddress
from slime_like.metrics.types import reduce_metrics
from slime_like.util.deadline import Deadline
from slime_like.weight_sync import manifest

if TYPE_CHECKING:
    from slime_like.cluster.workers.trainer_worker import TrainerWorker

TP = 8
RANKS_PER_ENGINE = 8
MICRO_BATCHES = 4  # of each data-parallel rank in a step
TOKENS = 8192  # of a micro-batch, in sequences of SEQUENCE tokens
SEQUENCE = 1024
PARTS = ("weights", "gradients", "optimizer")
LIMIT_S = 600.0
STARTED_TOGETHER = 4
SPEC = RankSpec(
    model=ModelConfig(hf_checkpoint="none"),
    optim=OptimConfig(),
    algo=GrpoConfig(),
    layout=Layout(tp=TP),
    device="cpu",
    dtype="float32",
    temperature=1.0,
    num_steps=1,
    steps_per_rollout=1,
    max_tokens_per_rank=TOKENS,
    seed=0,
    deadline_s=LIMIT_S,
)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of the start, and medians of a rollout: the driver's seconds per call, CPU seconds, and memory in MiB."""

    num_ranks: int
    start: float  # until all ranks have answered ``connect``
    step: float
    reduce: float
    push: float
    probe: float
    offload: float  # two moves of the ranks' state
    cpu: float
    memory: float


def measure(num_ranks: int, rounds: int) -> RankTimes:
    """Start ``num_ranks`` ranks in a new Ray cluster; return the medians over ``rounds`` rollouts after one warm-up rollout."""
    start = time.perf_counter()
    local_ray.start("scale")
    try:
        with tempfile.TemporaryDirectory() as stacks:
            group = _start_ranks(num_ranks, stacks)
            start_s = time.perf_counter() - start
            batch = make_batch(num_ranks // TP)
            rows = [_rollout(group, batch, num_ranks) for _ in range(rounds + 1)][1:]
    finally:
        local_ray.shutdown()
    return RankTimes(num_ranks, start_s, *(median(column) for column in zip(*rows, strict=True)))


def _start_ranks(num_ranks: int, stacks: str) -> TrainerGroup:
    workers = cast("list[ActorHandle[TrainerWorker]]", _start_actors(num_ranks, stacks))
    group = TrainerGroup(workers, replace(SPEC, layout=Layout(tp=TP, dp=num_ranks // TP)))
    connect([group], Deadline("driver", "connect", LIMIT_S))
    return group


def _start_actors(num_ranks: int, stacks: str) -> list[ActorHandle[SimulatedRank]]:
    """Start the ranks, a few at a time; each is suspended (SIGSTOP) until all have started.

    An idle worker of Ray wakes up 100 times a second and takes 1.5% of a core, which would slow down the start of later actors.
    """
    start_rank = start_actor(SimulatedRank, num_cpus=0)
    actors: list[ActorHandle[SimulatedRank]] = []
    processes: list[psutil.Process] = []
    try:
        for ranks in itertools.batched(range(num_ranks), STARTED_TOGETHER):
            actors += [start_rank(rank, num_ranks, stacks, {}) for rank in ranks]
            refs = {f"trainer rank {rank}": call(actors[rank], SimulatedRank.pid) for rank in ranks}
            pids = wait_all(refs, Deadline("driver", "start", LIMIT_S))
            started = [psutil.Process(pid) for pid in pids.values()]
            processes += started
            for process in started:
                process.suspend()
    finally:
        for process in processes:
            process.resume()
    return actors


def make_batch(dp: int) -> TrainBatch:
    """Return a step of ``MICRO_BATCHES`` micro-batches of ``TOKENS`` tokens for each of ``dp`` data-parallel ranks."""
    num_sequences = TOKENS // SEQUENCE
    micro_batch = PackedBatch(
        token_ids=np.zeros(TOKENS, dtype=np.int32),
        cu_seqlens=np.arange(num_sequences + 1, dtype=np.int32) * SEQUENCE,
        loss_weight=np.full(TOKENS, 1.0, dtype=np.float32),
        versions=np.zeros(TOKENS, dtype=np.int32),
        rollout_logprobs=np.zeros(TOKENS, dtype=np.float32),
        rewards=np.zeros(num_sequences, dtype=np.float32),
        advantages=np.zeros(num_sequences, dtype=np.float32),
        sample_ids=np.arange(num_sequences, dtype=np.int64),
    )
    step = StepBatch(((micro_batch,) * MICRO_BATCHES,) * dp, TOKENS * MICRO_BATCHES * dp)
    return TrainBatch(0, (step,))


def _rollout(group: TrainerGroup, batch: TrainBatch, num_ranks: int) -> list[float]:
    """Make the driver's calls of one rollout; return values for ``RankTimes``, in the order of its fields after ``start``."""
    cpu = cpu_seconds()
    offload, _ = _timed(lambda: group.keep_on_device(PARTS))
    step, stats = _timed(lambda: group.step(batch))
    reduction, values = _timed(lambda: reduce_metrics(stats.metrics))
    assert values["tokens"] == TP * batch.num_tokens, "every rank receives the shard of its data-parallel rank"
    assert values["comm/group_0/all_reduce/calls"] == num_ranks
    engines = [EngineAddress(f"engine {i}", "http://127.0.0.1:1", "", TP) for i in range(num_ranks // RANKS_PER_ENGINE)]
    push, tensors = _timed(lambda: group.send_weights(engines, TransportSpec("tensor", "gloo", 2**30, LIMIT_S)))
    manifest.check(stats.version, manifest.merge([MANIFEST]), tensors)
    probe, _ = _timed(lambda: group.score(batch.steps[0].micro_batches[0][0]))
    offload += _timed(lambda: group.keep_on_device(()))[0]
    memory = psutil.Process().memory_info().rss / 2**20
    return [step, reduction, push, probe, offload, cpu_seconds() - cpu, memory]


def _timed[R](work: Callable[[], R]) -> tuple[float, R]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
