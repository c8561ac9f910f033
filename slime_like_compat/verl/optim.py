"""Translation of a verl job's keys for batches, optimizer and schedule to keys of slime_like."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like_compat.verl.defaults import ACTOR, OPTIM, ROLLOUT
from slime_like_compat.verl.job import Job


def map_batches(job: Job) -> None:
    """Set the keys of batches, steps and rollouts. verl counts mini-batches in prompts, and its step is a rollout.

    Raises ``ConfigError`` if a number is invalid, or the size of a mini-batch does not divide that of the batch.
    """
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
        job.set("loop.num_rollout", job.integer(steps), steps, "a step of verl is a rollout")
        if job.has(epochs):
            job.leave_out(
                f"total_training_steps counts; verl would stop earlier only after {job.value(epochs)} epochs", epochs
            )
        return
    if "loop.num_rollout" in job.user_overrides:
        job.set_by_user(epochs, ["loop.num_rollout"])
        return
    note = f"epochs * (rows of the file // {prompts}) rollouts, as in verl"
    job.set("loop.num_epoch", job.integer(epochs), epochs, note)


def steps_per_rollout(job: Job) -> int:
    """Return the number of the actor's optimizer steps per rollout."""
    return job.count("data.train_batch_size") // job.count(f"{ACTOR}.ppo_mini_batch_size")


def map_optimizer(job: Job) -> None:
    """Set the keys of AdamW and its schedule. verl's schedule advances once per rollout, ours once per optimizer step."""
    for our_key, key in (("lr", "lr"), ("weight_decay", "weight_decay"), ("clip_grad", "clip_grad")):
        job.set(f"optim.{our_key}", float(job.number(f"{OPTIM}.{key}")), f"{OPTIM}.{key}")
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
    reason = "read only with optimizer_cpu_offload=True"
    job.leave_out(
        reason, offload, *(f"{OPTIM}.override_optimizer_config.{n}offload_fraction" for n in ("", "optimizer_"))
    )


def _warm_up(job: Job) -> None:
    steps, ratio_key = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    num_steps = steps_per_rollout(job)
    if job.value(steps) is not None and job.integer(steps) > 0:
        job.set(
            "optim.warmup_steps", job.integer(steps) * num_steps, steps, f"{num_steps} optimizer steps per step of verl"
        )
        job.leave_out("lr_warmup_steps counts", ratio_key)
        return
    ratio = job.number(ratio_key) if job.value(ratio_key) is not None else 0.0
    note = "; 0 is no warm-up in fsdp_workers.py of verl 0.8.0.dev" if job.value(steps) == 0 < ratio else ""
    job.leave_out(f"lr_warmup_steps_ratio counts{note}", steps)
    if ratio > 0:
        job.set("optim.warmup_fraction", float(ratio), ratio_key)
    job.leave_out("no warm-up", ratio_key)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of the actor's or the critic's learning rate, counted in verl's steps, which are rollouts."""

    shape: str
    key: str  # key of the shape: Megatron's lr_decay_style or FSDP's lr_scheduler_type
    floor: float = 0.0
    decay_steps: int | None = None
    tail: tuple[str, int | None] = ("", None)  # decay style and decay steps of wsd


def schedule_of(job: Job, optim: str) -> Schedule:
    """Return the schedule that the keys below ``optim`` describe. Keys that its shape does not read are ignored.

    Raises ``ConfigError`` if a value that it reads is invalid, or the shape is wsd and its decay steps are missing.
    """
    kind, style = f"{optim}.lr_scheduler_type", f"{optim}.lr_decay_style"
    key = kind if job.has(kind) and not job.has(style) else style
    shape = job.text(key).lower()
    if shape not in ("linear", "cosine", "wsd"):
        return Schedule(shape, key)
    floor_key, ratio, decay = f"{optim}.min_lr", f"{optim}.min_lr_ratio", f"{optim}.lr_decay_steps"
    floor = job.number(floor_key) if job.value(floor_key) is not None else 0.0
    if job.value(ratio):
        floor = floor or job.number(ratio) * job.number(f"{optim}.lr")
    steps = job.count(decay) if job.value(decay) is not None else None
    if shape != "wsd":
        return Schedule(shape, key, float(floor), steps)
    tail_steps = f"{optim}.lr_wsd_decay_steps"
    if job.value(tail_steps) is None and tail_steps not in job.needed:
        raise job.needs(key, tail_steps, 10)
    tail = job.text(f"{optim}.lr_wsd_decay_style").lower(), job.count(tail_steps)
    return Schedule(shape, key, float(floor), steps, tail)


def _schedule(job: Job) -> None:
    kind, ratio = f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.min_lr_ratio"
    style, floor_key, decay = f"{OPTIM}.lr_decay_style", f"{OPTIM}.min_lr", f"{OPTIM}.lr_decay_steps"
    tail_style, tail = f"{OPTIM}.lr_wsd_decay_style", f"{OPTIM}.lr_wsd_decay_steps"
    schedule, num_steps = schedule_of(job, OPTIM), steps_per_rollout(job)
    if schedule.shape not in ("constant", "linear", "cosine", "wsd"):
        job.refuse(schedule.key, "the schedule is not supported: one of constant, linear, cosine and wsd")
        return
    job.set("optim.schedule", schedule.shape, schedule.key)
    if schedule.shape != "constant":
        job.set("optim.min_lr", schedule.floor, floor_key if job.has(floor_key) else ratio)
        if schedule.decay_steps is not None:
            job.set("optim.decay_steps", schedule.decay_steps * num_steps, decay)
    if schedule.shape == "wsd":
        job.set("optim.wsd_decay_style", schedule.tail[0], tail_style)
        if schedule.tail[1] is not None:
            job.set("optim.wsd_decay_steps", schedule.tail[1] * num_steps, tail)
    job.leave_out(
        f"a {schedule.shape} schedule does not read it", style, floor_key, ratio, decay, tail_style, tail, kind
    )
