"""Translation of a verl job's keys for model path, run folder, checkpoints and loggers to keys of slime_like."""

from __future__ import annotations

from slime_like_compat.verl.defaults import MODEL
from slime_like_compat.verl.job import Job


def map_run(job: Job) -> None:
    """Set the keys of model path, run folder, checkpoints, loggers and dumps of rollouts."""
    if job.has(f"{MODEL}.path"):
        job.set("model.hf_checkpoint", job.text(f"{MODEL}.path"), f"{MODEL}.path")
    for our_key, key in (("run.dir", "trainer.default_local_dir"), ("run.name", "trainer.experiment_name")):
        if job.has(key) and job.settings[key].problem:
            job.leave_out(f"{job.settings[key].problem}: --with {our_key}=...; it has no effect on the training", key)
        elif job.sets(key):
            job.set(our_key, job.text(key), key)
        job.leave_out("as verl's default, none", key)
    for our_key, key in (
        ("run.save_interval", "trainer.save_freq"),
        ("run.keep_checkpoints", "trainer.max_actor_ckpt_to_keep"),
    ):
        if job.sets(key) and job.integer(key) > 0:
            job.set(our_key, job.integer(key), key)
    job.report("trainer.save_freq", "mapped", "slime_like also saves after the last rollout", "run.save_interval")
    job.leave_out("all are kept", "trainer.max_actor_ckpt_to_keep")
    _resume(job)
    _loggers(job)
    dump = "trainer.rollout_data_dir"
    if job.sets(dump) and job.text(dump):
        job.set("run.dump_rollouts", True, dump, "into run.dir/rollouts")
    job.leave_out("no dump", dump)


def _loggers(job: Job) -> None:
    loggers = job.texts("trainer.logger")
    for name in ("wandb", "tensorboard"):
        if name in loggers or name == "wandb":
            job.set(f"metrics.{name}", name in loggers, "trainer.logger")
    if other_loggers := sorted(set(loggers) - {"console", "wandb", "tensorboard"}):
        job.report(
            "trainer.logger",
            "mapped",
            f"no logger {', '.join(other_loggers)}; metrics.jsonl is always written",
            "metrics.wandb",
        )
    job.report("trainer.logger", "mapped", "", "metrics.wandb")
    project = "trainer.project_name"
    if job.has(project) and job.settings[project].problem:
        job.leave_out(f"{job.settings[project].problem}: --with metrics.wandb_project=...", project)
    elif "wandb" in loggers:
        job.set("metrics.wandb_project", job.text(project), project)
    job.leave_out("read only with wandb", project)


def _resume(job: Job) -> None:
    mode = str(job.value("trainer.resume_mode"))
    if mode == "resume_path":
        job.refuse("trainer.resume_mode", "verl's checkpoints cannot be read: export HF weights", ("run.resume",))
        return
    if mode not in ("auto", "disable"):
        job.refuse("trainer.resume_mode", "one of auto and disable", ("run.resume",))
        return
    job.set("run.resume", "never" if mode == "disable" else "auto", "trainer.resume_mode")
    job.leave_out("read only with resume_mode=resume_path", "trainer.resume_from_path")
