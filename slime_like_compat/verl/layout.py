"""Trainer ranks, their token budget and recompute, and the engines of a verl job in our keys."""

from __future__ import annotations

from slime_like_compat.conversion_rows import Row
from slime_like_compat.verl.defaults import ACTOR, MEGATRON, MODEL, ROLLOUT
from slime_like_compat.verl.job import Job

OFFLOADED = 0.5


def map_layout(job: Job, longest: int) -> None:
    """Ranks of the trainer and their token budget."""
    sizes = {"tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "ep": "expert_model"}
    for ours, name in sizes.items():
        key = f"{MEGATRON}.{name}_parallel_size"
        if job.value(key) is not None:
            job.set(f"parallel.{ours}", job.count(key), key)
        job.leave("one stage per rank", key)
    cp = f"{MEGATRON}.context_parallel_size"
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    cp = ulysses if job.has(ulysses) and not job.has(cp) else cp
    job.set("parallel.cp", job.count(cp), cp)
    for name, ours in (
        ("sequence_parallel", "sequence_parallel"),
        ("use_distributed_optimizer", "distributed_optimizer"),
    ):
        job.set(f"parallel.{ours}", job.switch(f"{MEGATRON}.{name}"), f"{MEGATRON}.{name}")
    _token_budget(job, longest, job.count(cp))
    _recompute(job)
    nodes, gpus = job.count("trainer.nnodes"), job.count("trainer.n_gpus_per_node")
    job.set("placement.actor_num_nodes", nodes, "trainer.nnodes")
    job.set("placement.actor_num_gpus_per_node", gpus, "trainer.n_gpus_per_node")
    if nodes > 1:
        job.set("placement.ray_address", "auto", "trainer.nnodes", "joins the cluster that ray start made")
    _engines(job, nodes * gpus)


def _token_budget(job: Job, longest: int, cp: int) -> None:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    packed = "micro-batches are packed by tokens"
    if job.switch(dynamic):
        job.set("parallel.max_tokens_per_rank", job.count(tokens), tokens)
        job.leave(packed, micro)
        job.tell(dynamic, "mapped", packed, "parallel.max_tokens_per_rank")
        return
    if job.value(micro) is not None:
        note = f"{packed}: as many as {job.count(micro)} of the longest sequences have"
        job.set("parallel.max_tokens_per_rank", -(-job.count(micro) * longest // cp), micro, note)
    job.leave("counts with use_dynamic_bsz=True; " + packed, tokens)
    job.leave(packed, dynamic)


def _recompute(job: Job) -> None:
    key, prefix = f"{MODEL}.enable_gradient_checkpointing", f"{MEGATRON}.override_transformer_config"
    how, method, layers, modules = (
        f"{prefix}.recompute_{n}" for n in ("granularity", "method", "num_layers", "modules")
    )
    megatron = job.has(how) or job.settings.get("model_engine") is not None
    if not megatron:
        job.set("model.recompute", "full" if job.switch(key) else "none", key)
        return
    job.leave("recompute_granularity counts", key)
    if job.sets(how):
        job.set("model.recompute", job.text(how), how)
        if job.value(how) == "full":
            if job.sets(method):
                job.set("model.recompute_method", job.text(method), method)
            if job.sets(layers):
                job.set("model.recompute_num_layers", job.count(layers), layers)
        elif job.sets(modules):
            job.set("model.recompute_modules", job.texts(modules), modules)
    job.leave(
        f"recompute_granularity={job.value(how) if job.has(how) else None} does not read it",
        how,
        method,
        layers,
        modules,
    )


def _engines(job: Job, ranks: int) -> None:
    tp, mode = f"{ROLLOUT}.tensor_model_parallel_size", "trainer.v1.trainer_mode"
    size = job.count(tp)
    job.set("rollout.tp", size, tp)
    threshold, warm = "trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.separate_async.num_warmup_batches"
    nodes, gpus, push = (
        f"{ROLLOUT}.nnodes",
        f"{ROLLOUT}.n_gpus_per_node",
        "trainer.v1.separate_async.parameter_sync_step",
    )
    match job.value(mode):
        case "sync":
            job.leave("counts with an asynchronous trainer_mode", threshold, warm, nodes, push)
            job.leave("counts with rollout.nnodes", gpus)
        case "separate_async":
            ranks = job.count(nodes) * job.count(gpus if job.value(gpus) is not None else "trainer.n_gpus_per_node")
            job.set("placement.mode", "split", mode)
            most = job.whole(threshold) - 1
            ahead = min(job.whole(warm), most)
            if ahead < 1:
                raise job.wrong(
                    threshold if most < 1 else warm, "lets no rollout run beside training: trainer_mode=sync says that"
                )
            job.set("loop.max_staleness", ahead, warm, "rollouts begun ahead")
            job.tell(
                threshold,
                "mapped",
                f"a sample may span that many versions, so it lags {most} at most",
                "loop.max_staleness",
            )
            job.tell(
                push,
                "mapped",
                "optimizer steps between pushes: data.train_batch_size / ppo_mini_batch_size",
                "loop.steps_per_rollout",
            )
            job.tell(nodes, "mapped", "", "rollout.num_engines")
            job.tell(gpus, "mapped", "", "rollout.num_engines")
            if not job.has(push):
                note = "follows from the batch sizes here"
                job.rows.append(Row(push, str(job.value(push)), "", "default", ("loop.steps_per_rollout",), note))
        case other:
            job.refuse(
                mode,
                f"{other}: overlapping rollouts have GPUs of their own here (separate_async, placement.mode=split)",
            )
    if ranks % size:
        raise job.wrong(tp, f"does not divide the {ranks} GPUs of the engines")
    job.set("rollout.num_engines", ranks // size, tp)
    memory = f"{ROLLOUT}.gpu_memory_utilization"
    if job.sets(memory):
        high = job.number(memory) > OFFLOADED and job.value(mode) == "sync"
        note = "both sides stay on the GPUs here: lower it to what train.py --plan leaves" if high else ""
        job.set("rollout.sglang.mem_fraction_static", float(job.number(memory)), memory, note)
    seqs, bucket = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    if job.sets(seqs):
        job.set("rollout.max_running_requests", job.count(seqs), seqs)
    if job.sets(bucket):
        job.set("weights.bucket_mb", float(job.number(bucket)), bucket)
