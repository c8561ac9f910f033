"""Translation of a verl job's keys for engines, placement and asynchronous rollouts to keys of slime_like."""

from __future__ import annotations

from slime_like_compat.conversion_rows import ENGINE_MEMORY_NOTE, MAX_ENGINE_MEMORY, Row
from slime_like_compat.verl.defaults import ROLLOUT
from slime_like_compat.verl.job import Job
from slime_like_compat.verl.optim import steps_per_rollout

_MODE = "trainer.v1.trainer_mode"
_THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
_WARMUP = "trainer.v1.separate_async.num_warmup_batches"
_PUSH = "trainer.v1.separate_async.parameter_sync_step"
_NODES, _GPUS = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"


def map_engines(job: Job, ranks: int) -> None:
    """Set the keys for engines, placement and staleness. ``ranks``: number of the trainer's GPUs.

    Raises ``ConfigError`` if the engines' GPUs do not divide into engines, or the asynchronous settings are not supported.
    """
    tp = f"{ROLLOUT}.tensor_model_parallel_size"
    size = job.count(tp)
    job.set("rollout.tp", size, tp)
    match job.value(_MODE):
        case "sync":
            job.leave_out("read only with an asynchronous trainer_mode", _THRESHOLD, _WARMUP, _NODES, _PUSH)
            job.leave_out("read only with rollout.nnodes", _GPUS)
        case "separate_async":
            ranks = job.count(_NODES) * job.count(_GPUS if job.value(_GPUS) is not None else "trainer.n_gpus_per_node")
            _run_ahead(job)
        case other:
            job.refuse(
                _MODE,
                f"{other}: rollouts during training need GPUs of their own here (separate_async, placement.mode=split)",
            )
    if ranks % size:
        raise job.wrong(tp, f"does not divide the {ranks} GPUs of the engines")
    job.set("rollout.num_engines", ranks // size, tp)
    _limits(job)


def _run_ahead(job: Job) -> None:
    """Set ``placement.mode=split`` and the staleness for rollouts that run during training.

    Raises ``ConfigError`` if the job allows no such rollout, or does not push weights once per rollout.
    """
    job.set("placement.mode", "split", _MODE)
    max_lag = job.integer(_THRESHOLD) - 1
    num_ahead = min(job.integer(_WARMUP), max_lag)
    if num_ahead < 1:
        key = _THRESHOLD if max_lag < 1 else _WARMUP
        raise job.wrong(key, "allows no rollout during training: use trainer_mode=sync")
    job.set("loop.max_staleness", num_ahead, _WARMUP, "rollouts started ahead")
    note = f"a sample may span that many versions, so its lag is {max_lag} at most"
    job.report(_THRESHOLD, "mapped", note, "loop.max_staleness")
    steps = steps_per_rollout(job)
    if job.count(_PUSH) != steps:
        raise job.wrong(_PUSH, f"must be data.train_batch_size / ppo_mini_batch_size: set it to {steps}")
    note = "optimizer steps between pushes: data.train_batch_size / ppo_mini_batch_size"
    job.report(_PUSH, "mapped", note, "loop.steps_per_rollout")
    if not job.has(_PUSH):
        note = "follows from the batch sizes here"
        job.rows.append(Row(_PUSH, str(job.value(_PUSH)), "", "default", ("loop.steps_per_rollout",), note))
    job.report(_NODES, "mapped", "", "rollout.num_engines")
    job.report(_GPUS, "mapped", "", "rollout.num_engines")


def _limits(job: Job) -> None:
    """Set the keys for an engine's share of memory, its maximum number of running requests and the size of weight buckets."""
    memory = f"{ROLLOUT}.gpu_memory_utilization"
    if job.sets(memory):
        is_high = job.number(memory) > MAX_ENGINE_MEMORY and job.value(_MODE) == "sync"
        note = ENGINE_MEMORY_NOTE if is_high else ""
        job.set("rollout.sglang.mem_fraction_static", float(job.number(memory)), memory, note)
    seqs, bucket = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    if job.sets(seqs):
        job.set("rollout.max_running_requests", job.count(seqs), seqs)
    if job.sets(bucket):
        job.set("weights.bucket_mb", float(job.number(bucket)), bucket)
