"""Critic of a verl job in our keys."""

from __future__ import annotations

from slime_like_compat.verl.defaults import ACTOR, CRITIC, OPTIM, SCHEDULE
from slime_like_compat.verl.job import Job
from slime_like_compat.verl.optim import schedule_of, steps_per_rollout


def map_critic(job: Job) -> None:
    """Set the critic of algo=ppo."""
    if job.algo != "ppo":
        for key in [key for key in job.settings if key.startswith("critic.")]:
            job.leave(f"algo={job.algo} has no critic", key)
        job.leave(f"algo={job.algo} has no critic", "trainer.critic_warmup")
        return
    job.set("critic.lr", float(job.number("critic.optim.lr")), "critic.optim.lr")
    job.set("critic.value_clip", float(job.number("critic.cliprange_value")), "critic.cliprange_value")
    warm = "critic.optim.lr_warmup_steps"
    if job.value(warm) is not None and job.whole(warm) > 0:
        job.set("critic.lr_warmup_steps", job.whole(warm) * steps_per_rollout(job), warm, "optimizer steps")
    job.leave("no warm-up", warm)
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
        job.refuse(mini, "the critic takes its steps with the actor's: ppo_mini_batch_size is one")
    job.leave("the actor's", mini)
    _same_as_actor(job)
    first = job.whole("trainer.critic_warmup")
    job.set(
        "critic.warmup_rollouts", max(0, first - 1), "trainer.critic_warmup", "verl trains the actor from this step on"
    )


def _same_as_actor(job: Job) -> None:
    """Refuse settings of the critic, or defaults of verl's, that differ from the actor's, which the critic has here."""
    for name in ("weight_decay", "clip_grad", "betas"):
        key, read = f"{CRITIC}.{name}", job.pair if name == "betas" else job.number
        _compare(job, key, read(key), read(f"{OPTIM}.{name}"))
    critic, actor = schedule_of(job, CRITIC), schedule_of(job, OPTIM)
    _compare(job, critic.key, critic.shape, actor.shape)
    if critic.shape == actor.shape != "constant":
        floor = min(actor.floor, job.number(f"{CRITIC}.lr"))
        _compare(job, f"{CRITIC}.min_lr", critic.floor, floor, or_key=f"{CRITIC}.min_lr_ratio")
        _compare(job, f"{CRITIC}.lr_decay_steps", critic.decay_steps, actor.decay_steps)
        _compare(job, f"{CRITIC}.lr_wsd_decay_style", critic.tail[0], actor.tail[0])
        _compare(job, f"{CRITIC}.lr_wsd_decay_steps", critic.tail[1], actor.tail[1])
    for name in SCHEDULE:
        job.leave(f"a {critic.shape} schedule does not read it", f"{CRITIC}.{name}")
    share, steps = f"{CRITIC}.lr_warmup_steps_ratio", f"{CRITIC}.lr_warmup_steps"
    if job.value(share) and job.number(share) > 0 and not (job.value(steps) and job.whole(steps) > 0):
        job.refuse(share, f"the critic's warm-up is given in steps of verl: {steps}")
    job.leave("no warm-up, or that of lr_warmup_steps", share)
    if job.has("critic.loss_agg_mode") and job.value("critic.loss_agg_mode") == job.value(f"{ACTOR}.loss_agg_mode"):
        job.leave("the actor's", "critic.loss_agg_mode")


def _compare(job: Job, key: str, critic: object, actor: object, or_key: str = "") -> None:
    """Refuse ``key`` if verl's critic would have another value than the actor; leave it out otherwise."""
    named = or_key if or_key and job.has(or_key) and not job.has(key) else key
    if critic == actor:
        job.leave("the actor's", named)
        return
    text = str(list(actor) if isinstance(actor, tuple) else actor).replace(" ", "")  # pyright: ignore[reportUnknownArgumentType]
    job.refuse(named, f"the critic has the actor's optimizer and schedule, which say {text}: give the critic the same")
