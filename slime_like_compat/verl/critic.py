"""Translation of a verl job's keys for the critic to keys of slime_like."""

from __future__ import annotations

from slime_like_compat.verl.defaults import ACTOR, CRITIC, OPTIM, SCHEDULE
from slime_like_compat.verl.job import Job
from slime_like_compat.verl.optim import schedule_of, steps_per_rollout


def map_critic(job: Job) -> None:
    """Translate verl's critic settings to ``critic.*`` under algo=ppo; under other algorithms, report them as left out."""
    if job.algo != "ppo":
        for key in [key for key in job.settings if key.startswith("critic.")]:
            job.leave_out(f"algo={job.algo} has no critic", key)
        job.leave_out(f"algo={job.algo} has no critic", "trainer.critic_warmup")
        return
    job.set("critic.lr", float(job.number("critic.optim.lr")), "critic.optim.lr")
    job.set("critic.value_clip", float(job.number("critic.cliprange_value")), "critic.cliprange_value")
    warmup = "critic.optim.lr_warmup_steps"
    if job.value(warmup) is not None and job.integer(warmup) > 0:
        job.set("critic.lr_warmup_steps", job.integer(warmup) * steps_per_rollout(job), warmup, "optimizer steps")
    job.leave_out("no warm-up", warmup)
    if job.value("critic.model.path") is not None:
        job.set("critic.hf_checkpoint", job.text("critic.model.path"), "critic.model.path")
    for our_key, name in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context")):
        key = f"critic.megatron.{name}_parallel_size"
        if job.sets(key):
            job.set(f"critic.{our_key}", job.count(key), key)
    ulysses = "critic.ulysses_sequence_parallel_size"
    if job.sets(ulysses):
        job.set("critic.cp", job.count(ulysses), ulysses)
    mini = "critic.ppo_mini_batch_size"
    if job.sets(mini) and job.count(mini) != job.count(f"{ACTOR}.ppo_mini_batch_size"):
        job.refuse(
            mini,
            f"the critic has the actor's optimizer steps: give it {job.count(f'{ACTOR}.ppo_mini_batch_size')} as well",
        )
    job.leave_out("the actor's", mini)
    _same_as_actor(job)
    first_step = job.integer("trainer.critic_warmup")
    job.set(
        "critic.warmup_rollouts",
        max(0, first_step - 1),
        "trainer.critic_warmup",
        "verl trains the actor from this step on",
    )


def _same_as_actor(job: Job) -> None:
    """Refuse each setting of the critic's optimizer or schedule that differs from the actor's.

    Here the critic has the actor's optimizer and schedule. A setting that the job leaves out counts with verl's default.
    A warm-up that is given only as a ratio is refused as well.
    """
    for name in ("weight_decay", "clip_grad", "betas"):
        key, read_value = f"{CRITIC}.{name}", job.pair if name == "betas" else job.number
        _compare(job, key, read_value(key), read_value(f"{OPTIM}.{name}"))
    critic, actor = schedule_of(job, CRITIC), schedule_of(job, OPTIM)
    _compare(job, critic.key, critic.shape, actor.shape)
    if critic.shape == actor.shape != "constant":
        floor = min(actor.floor, job.number(f"{CRITIC}.lr"))
        _compare(job, f"{CRITIC}.min_lr", critic.floor, floor, or_key=f"{CRITIC}.min_lr_ratio")
        _compare(job, f"{CRITIC}.lr_decay_steps", critic.decay_steps, actor.decay_steps)
        _compare(job, f"{CRITIC}.lr_wsd_decay_style", critic.tail[0], actor.tail[0])
        _compare(job, f"{CRITIC}.lr_wsd_decay_steps", critic.tail[1], actor.tail[1])
    for name in SCHEDULE:
        job.leave_out(f"a {critic.shape} schedule does not read it", f"{CRITIC}.{name}")
    ratio, steps = f"{CRITIC}.lr_warmup_steps_ratio", f"{CRITIC}.lr_warmup_steps"
    if job.value(ratio) and job.number(ratio) > 0 and not (job.value(steps) and job.integer(steps) > 0):
        job.refuse(ratio, f"the critic's warm-up is counted in steps of verl: give {steps}")
    job.leave_out("no warm-up, or the warm-up of lr_warmup_steps", ratio)
    if job.has("critic.loss_agg_mode") and job.value("critic.loss_agg_mode") == job.value(f"{ACTOR}.loss_agg_mode"):
        job.leave_out("the actor's", "critic.loss_agg_mode")


def _compare(job: Job, key: str, critic: object, actor: object, or_key: str = "") -> None:
    """Refuse ``key`` if the values of verl's critic and actor differ; if they are equal, report that the actor's is used.

    If the job sets ``or_key`` but not ``key``, do this for ``or_key`` instead.
    """
    key = or_key if or_key and job.has(or_key) and not job.has(key) else key
    if critic == actor:
        job.leave_out("the actor's", key)
        return
    text = str(list(actor) if isinstance(actor, tuple) else actor).replace(" ", "")  # pyright: ignore[reportUnknownArgumentType]
    job.refuse(key, f"the critic has the actor's optimizer and schedule: give the critic {text} as well")
