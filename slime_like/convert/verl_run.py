"""Batches, schedule, layout and engines of a verl job in our keys."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.convert.rows import Row
from slime_like.convert.verl_defaults import ACTOR, MEGATRON, MODEL, OPTIM, ROLLOUT
from slime_like.convert.verl_job import Job

OFFLOADED = 0.5


def map_batches(job: Job) -> None:
    """Prompts, samples, optimizer steps and rollouts. verl counts mini-batches in prompts and a step is a rollout."""
    prompts, mini = job.count("data.train_batch_size"), job.count(f"{ACTOR}.ppo_mini_batch_size")
    if prompts % mini:
        raise job.wrong(f"{ACTOR}.ppo_mini_batch_size", f"does not divide data.train_batch_size={prompts}")
    samples = job.count(f"{ROLLOUT}.n")
    job.set("rollout.batch_size", prompts, "data.train_batch_size", "prompts")
    job.set("rollout.n_samples_per_prompt", samples, f"{ROLLOUT}.n")
    note = f"{mini} prompts of {prompts}: {prompts // mini} optimizer steps of {mini * samples} samples"
    job.set("loop.steps_per_rollout", prompts // mini, f"{ACTOR}.ppo_mini_batch_size", note)
    job.set("loop.global_batch_size", mini * samples, f"{ACTOR}.ppo_mini_batch_size")
    _rollouts(job, prompts)


def _rollouts(job: Job, prompts: int) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if job.value(steps) is not None:
        job.set("loop.num_rollout", job.whole(steps), steps, "a step of verl is a rollout")
        if job.has(epochs):
            job.leave(
                f"total_training_steps counts; verl would stop before it only after {job.value(epochs)} epochs", epochs
            )
        return
    if "loop.num_rollout" in job.ours:
        job.settle(epochs, ["loop.num_rollout"])
        return
    note = f"epochs * (rows of the file // {prompts}) rollouts, as in verl"
    job.set("loop.num_epoch", job.whole(epochs), epochs, note)


def steps_per_rollout(job: Job) -> int:
    """Optimizer steps of the actor per rollout."""
    return job.count("data.train_batch_size") // job.count(f"{ACTOR}.ppo_mini_batch_size")


def map_optimizer(job: Job) -> None:
    """AdamW and its schedule. verl's schedule goes on once per rollout, ours once per optimizer step."""
    for ours, key in (("lr", "lr"), ("weight_decay", "weight_decay"), ("clip_grad", "clip_grad")):
        job.set(f"optim.{ours}", float(job.number(f"{OPTIM}.{key}")), f"{OPTIM}.{key}")
    beta1, beta2 = job.pair(f"{OPTIM}.betas")
    job.set("optim.beta1", beta1, f"{OPTIM}.betas")
    job.set("optim.beta2", beta2, f"{OPTIM}.betas")
    _warm_up(job)
    _schedule(job)
    offload = f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"
    if job.sets(offload) and job.switch(offload):
        job.set("optim.cpu_offload", True, offload)
        for name in ("optimizer_offload_fraction", "offload_fraction"):
            key = f"{OPTIM}.override_optimizer_config.{name}"
            if job.sets(key):
                job.set("optim.cpu_offload_fraction", float(job.number(key)), key)
    off = "counts with optimizer_cpu_offload=True"
    job.leave(off, offload, *(f"{OPTIM}.override_optimizer_config.{n}offload_fraction" for n in ("", "optimizer_")))


def _warm_up(job: Job) -> None:
    steps, share = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    each = steps_per_rollout(job)
    if job.value(steps) is not None and job.whole(steps) > 0:
        job.set("optim.warmup_steps", job.whole(steps) * each, steps, f"{each} optimizer steps per step of verl")
        job.leave("lr_warmup_steps counts", share)
        return
    ratio = job.number(share) if job.value(share) is not None else 0.0
    older = "; 0 is no warm-up in fsdp_workers.py of verl 0.8.0.dev" if job.value(steps) == 0 < ratio else ""
    job.leave(f"lr_warmup_steps_ratio counts{older}", steps)
    if ratio > 0:
        job.set("optim.warmup_fraction", float(ratio), share)
    job.leave("no warm-up", share)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of the actor's or the critic's learning rate, in verl's own steps."""

    shape: str
    key: str  # that says the shape: Megatron's lr_decay_style or FSDP's lr_scheduler_type
    floor: float = 0.0
    decay_steps: int | None = None
    tail: tuple[str, int | None] = ("", None)  # of wsd


def schedule_of(job: Job, optim: str) -> Schedule:
    """Return the schedule that the keys below ``optim`` describe; keys that its shape does not read have no part in it."""
    kind, style = f"{optim}.lr_scheduler_type", f"{optim}.lr_decay_style"
    key = kind if job.has(kind) and not job.has(style) else style
    shape = job.text(key).lower()
    if shape not in ("linear", "cosine", "wsd"):
        return Schedule(shape, key)
    least, ratio, decay = f"{optim}.min_lr", f"{optim}.min_lr_ratio", f"{optim}.lr_decay_steps"
    floor = job.number(least) if job.value(least) is not None else 0.0
    if job.value(ratio):
        floor = floor or job.number(ratio) * job.number(f"{optim}.lr")
    steps = job.count(decay) if job.value(decay) is not None else None
    if shape != "wsd":
        return Schedule(shape, key, float(floor), steps)
    last = f"{optim}.lr_wsd_decay_steps"
    tail = job.text(f"{optim}.lr_wsd_decay_style").lower(), None if job.value(last) is None else job.count(last)
    return Schedule(shape, key, float(floor), steps, tail)


def _schedule(job: Job) -> None:
    kind, ratio = f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.min_lr_ratio"
    style, least, decay = f"{OPTIM}.lr_decay_style", f"{OPTIM}.min_lr", f"{OPTIM}.lr_decay_steps"
    tail_style, tail = f"{OPTIM}.lr_wsd_decay_style", f"{OPTIM}.lr_wsd_decay_steps"
    schedule, each = schedule_of(job, OPTIM), steps_per_rollout(job)
    if schedule.shape not in ("constant", "linear", "cosine", "wsd"):
        job.refuse(schedule.key, "no such schedule here: constant, linear, cosine or wsd")
        return
    job.set("optim.schedule", schedule.shape, schedule.key)
    if schedule.shape != "constant":
        job.set("optim.min_lr", schedule.floor, least if job.has(least) else ratio)
        if schedule.decay_steps is not None:
            job.set("optim.decay_steps", schedule.decay_steps * each, decay)
    if schedule.shape == "wsd":
        job.set("optim.wsd_decay_style", schedule.tail[0], tail_style)
        if schedule.tail[1] is not None:
            job.set("optim.wsd_decay_steps", schedule.tail[1] * each, tail)
    job.leave(f"a {schedule.shape} schedule does not read it", style, least, ratio, decay, tail_style, tail, kind)


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
