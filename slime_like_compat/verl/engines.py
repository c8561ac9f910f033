"""Engines of a verl job in our keys: how many, on which GPUs, and how far they run ahead of the trainer."""

from __future__ import annotations

from slime_like_compat.conversion_rows import Row
from slime_like_compat.verl.defaults import ROLLOUT
from slime_like_compat.verl.job import Job
from slime_like_compat.verl.optim import steps_per_rollout

OFFLOADED = 0.5
_MODE = "trainer.v1.trainer_mode"
_THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
_WARM = "trainer.v1.separate_async.num_warmup_batches"
_PUSH = "trainer.v1.separate_async.parameter_sync_step"
_NODES, _GPUS = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"


def map_engines(job: Job, ranks: int) -> None:
    """Set the engines of a job whose trainer has ``ranks`` GPUs."""
    tp = f"{ROLLOUT}.tensor_model_parallel_size"
    size = job.count(tp)
    job.set("rollout.tp", size, tp)
    match job.value(_MODE):
        case "sync":
            job.leave("read only with an asynchronous trainer_mode", _THRESHOLD, _WARM, _NODES, _PUSH)
            job.leave("read only with rollout.nnodes", _GPUS)
        case "separate_async":
            ranks = job.count(_NODES) * job.count(_GPUS if job.value(_GPUS) is not None else "trainer.n_gpus_per_node")
            _run_ahead(job)
        case other:
            job.refuse(
                _MODE,
                f"{other}: overlapping rollouts have GPUs of their own here (separate_async, placement.mode=split)",
            )
    if ranks % size:
        raise job.wrong(tp, f"does not divide the {ranks} GPUs of the engines")
    job.set("rollout.num_engines", ranks // size, tp)
    _limit(job)


def _run_ahead(job: Job) -> None:
    """Set the placement and the staleness of rollouts that run while the trainer works."""
    job.set("placement.mode", "split", _MODE)
    max_lag = job.whole(_THRESHOLD) - 1
    ahead = min(job.whole(_WARM), max_lag)
    if ahead < 1:
        key = _THRESHOLD if max_lag < 1 else _WARM
        raise job.wrong(key, "lets no rollout run beside training: trainer_mode=sync says that")
    job.set("loop.max_staleness", ahead, _WARM, "rollouts started ahead")
    lag = f"a sample may span that many versions, so it lags {max_lag} at most"
    job.tell(_THRESHOLD, "mapped", lag, "loop.max_staleness")
    steps = steps_per_rollout(job)
    if job.count(_PUSH) != steps:
        raise job.wrong(_PUSH, f"must be data.train_batch_size / ppo_mini_batch_size: set it to {steps}")
    between = "optimizer steps between pushes: data.train_batch_size / ppo_mini_batch_size"
    job.tell(_PUSH, "mapped", between, "loop.steps_per_rollout")
    if not job.has(_PUSH):
        note = "follows from the batch sizes here"
        job.rows.append(Row(_PUSH, str(job.value(_PUSH)), "", "default", ("loop.steps_per_rollout",), note))
    job.tell(_NODES, "mapped", "", "rollout.num_engines")
    job.tell(_GPUS, "mapped", "", "rollout.num_engines")


def _limit(job: Job) -> None:
    """Set the memory, the requests and the weight buckets of an engine."""
    memory = f"{ROLLOUT}.gpu_memory_utilization"
    if job.sets(memory):
        high = job.number(memory) > OFFLOADED and job.value(_MODE) == "sync"
        note = "both sides stay on the GPUs here: lower it to what train.py --plan leaves" if high else ""
        job.set("rollout.sglang.mem_fraction_static", float(job.number(memory)), memory, note)
    seqs, bucket = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    if job.sets(seqs):
        job.set("rollout.max_running_requests", job.count(seqs), seqs)
    if job.sets(bucket):
        job.set("weights.bucket_mb", float(job.number(bucket)), bucket)
