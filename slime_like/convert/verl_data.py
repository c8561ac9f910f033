"""Sampling, data, evaluation, rewards, critic and the run's folder of a verl job in our keys."""

from __future__ import annotations

import re
from pathlib import Path

from slime_like.config.render import render
from slime_like.convert.verl_defaults import ACTOR, CRITIC, MODEL, OPTIM, ROLLOUT, SCHEDULE
from slime_like.convert.verl_job import Job
from slime_like.convert.verl_run import schedule_of, steps_per_rollout

MANAGERS = ("naive", "dapo", "prime")
NO_LIMIT = 1_000_000
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
AFTER_PENALTY = ("seq_reward", "seq_final_reward")
METRICS = ("acc", "score", *AFTER_PENALTY)
"""What verl compares a group by: fields of the reward function's result, or (recipe.dapo) sums of the rewards of tokens."""
_SETS = ("test", "val", "valid", "validation", "dev", "eval", "train", "data")


def lengths(job: Job) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response."""
    prompt, response = f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"
    return (
        job.count(prompt if job.sets(prompt) else "data.max_prompt_length"),
        job.count(response if job.sets(response) else "data.max_response_length"),
    )


def map_rollout(job: Job) -> None:
    """Sampling and lengths."""
    prompt, response = lengths(job)
    for ours, keys, value in (
        ("data.max_prompt_len", (f"{ROLLOUT}.prompt_length", "data.max_prompt_length"), prompt),
        ("rollout.max_response_len", (f"{ROLLOUT}.response_length", "data.max_response_length"), response),
    ):
        job.set(ours, value, keys[0] if job.sets(keys[0]) else keys[1])
        job.leave(f"{keys[0]} counts", keys[1])
    engine = f"{ROLLOUT}.max_model_len"
    context = prompt + response if job.value(engine) is None else min(prompt + response, job.count(engine))
    job.set(
        "rollout.max_context_len",
        context,
        engine if job.sets(engine) else "data.max_response_length",
        "prompt and response",
    )
    job.set("rollout.temperature", float(job.number(f"{ROLLOUT}.temperature")), f"{ROLLOUT}.temperature")
    job.set("rollout.top_p", float(job.number(f"{ROLLOUT}.top_p")), f"{ROLLOUT}.top_p")
    job.set("rollout.top_k", job.whole(f"{ROLLOUT}.top_k"), f"{ROLLOUT}.top_k")
    _filter_groups(job)


def _filter_groups(job: Job) -> None:
    on, metric, rounds = (f"algorithm.filter_groups.{n}" for n in ("enable", "metric", "max_num_gen_batches"))
    if not job.switch(on):
        job.leave("off", on, metric, rounds)
        return
    job.set("rollout.filters", ["nonzero_std"], on)
    job.set("rollout.max_refills", NO_LIMIT, on, "verl's own loop has no limit")
    job.leave("verl's own loop ignores it; where it counts, N generated batches are N - 1 refills", rounds)
    name, penalty = job.value(metric), f"{OVERLONG}.enable"
    before = "groups of equal rewards are dropped, before the penalty on long answers and the KL in the reward"
    after_penalty = name in AFTER_PENALTY and job.sets(penalty) and job.switch(penalty)
    after_kl = name == "seq_final_reward" and job.switch("algorithm.use_kl_in_reward")
    if name not in (None, *METRICS):
        job.refuse(metric, f"groups are compared by their rewards: there are {', '.join(METRICS)}")
    elif after_penalty or after_kl:
        job.refuse(metric, f"{before}: acc or score")
    job.tell(metric, "mapped", before, "rollout.filters")


def map_data(job: Job) -> None:
    """Files, columns and templates."""
    train = job.texts("data.train_files") if job.sets("data.train_files") else []
    if len(train) == 1:
        job.set("data.train", train[0], "data.train_files")
    else:
        what = "one file here: write the rows of all into one" if train else "must be given"
        job.refuse("data.train_files", what, ("data.train",))
    job.set("data.input_key", job.text("data.prompt_key"), "data.prompt_key")
    job.set("data.label_key", "reward_model.ground_truth", "reward_model.ground_truth (column)")
    job.set("data.metadata_key", "extra_info", "extra_info (column)")
    job.set("data.shuffle", job.switch("data.shuffle"), "data.shuffle")
    if job.value("data.seed") is not None:
        job.set("run.seed", job.whole("data.seed"), "data.seed")
    job.leave("run.seed is the one seed", "data.seed")
    for key in [key for key in job.settings if key.startswith("data.apply_chat_template_kwargs.")]:
        if job.has(key):
            job.set(f"data.chat_template_kwargs.{key.rpartition('.')[2]}", job.value(key), key)
    cut, skipped = "data.truncation", "data.filter_overlong_prompts"
    if job.switch(skipped):
        job.set(
            "data.on_bad_row",
            "skip",
            skipped,
            "longer prompts are left out and counted, as are rows that cannot be used",
        )
        job.leave("longer prompts are left out", cut)
        return
    note = "a longer prompt ends the run when data is read"
    if job.value(cut) == "error":
        job.tell(cut, "mapped", note, "data.on_bad_row")
    else:
        job.refuse(
            cut, "prompts are not cut: filter_overlong_prompts=True leaves longer ones out", ("data.on_bad_row",)
        )
    job.tell(skipped, "mapped", note, "data.on_bad_row")


def map_evaluation(job: Job) -> None:
    """Held-out prompts: verl samples them by val_kwargs alone."""
    files = job.texts("data.val_files") if job.sets("data.val_files") else []
    every, before = job.whole("trainer.test_freq"), job.switch("trainer.val_before_train")
    sampling = {"n_samples_per_prompt": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
    keys = [f"{ROLLOUT}.val_kwargs.{name}" for name in sampling.values()]
    greedy = f"{ROLLOUT}.val_kwargs.do_sample"
    job.leave("verl's own loop reads val_kwargs.temperature alone", greedy)
    if not files or (every <= 0 and not before):
        why = "nothing is evaluated: no data.val_files, or test_freq and val_before_train are off"
        job.leave(why, "data.val_files", "trainer.test_freq", "trainer.val_before_train", *keys)
        return
    for name, path in _named(files).items():
        job.set(f"evaluation.datasets.{name}", path, "data.val_files")
    if every > 0:
        job.set("evaluation.interval", every, "trainer.test_freq")
    job.tell("trainer.test_freq", "mapped", "here also after the last rollout", "evaluation.interval")
    job.set("evaluation.before_train", before, "trainer.val_before_train")
    for (ours, _), key in zip(sampling.items(), keys, strict=True):
        read = job.whole if ours in ("n_samples_per_prompt", "top_k") else job.number
        number = read(key)
        job.set(f"evaluation.{ours}", number if read == job.whole else float(number), key)


def _named(paths: list[str]) -> dict[str, str]:
    """Files by a name for each: that of the file, or of its folder where the file is called test or the like."""
    found: dict[str, str] = {}
    for path in paths:
        parts = [part for part in Path(path.partition("@")[0].rpartition(".")[0] or "val").parts if part != "/"]
        stem = next((part for part in reversed(parts) if part.lower() not in _SETS), parts[-1] if parts else "val")
        name = re.sub(r"\W+", "_", stem).strip("_").lower() or "val"
        name = name if name not in found else f"{name}_{len(found)}"
        found[name] = path
    return found


def map_rewards(job: Job, max_response_len: int) -> None:
    """The reward has to be named: verl chooses it by the column ``data_source`` of each row, or runs a file."""
    by_row, own, manager = "data.reward_fn_key", "reward.custom_reward_function.path", "reward.reward_manager.name"
    settles = ("reward.name", "reward.weights")
    if job.value(own) is not None and not any(name in job.ours for name in settles):
        function = "reward.custom_reward_function.name"
        name = job.text(function) if job.sets(function) else "compute_score"
        job.overrides["reward.name"] = render(f"{Path(job.text(own)).stem}:{name}")
        job.tell(own, "code", "a RewardFn of slime_like/interfaces.py (docs/rewards.md)", "reward.name")
        job.leave("reward.name scores every row", by_row)
    elif job.value(own) is not None:
        job.refuse(own, "", settles)
        job.leave("reward.name scores every row", by_row)
    else:
        why = (
            "verl chooses the reward by this column of each row (data_source): name one, or write rm_type into the rows"
        )
        job.refuse(by_row, why, settles)
        job.leave("no function of its own", own)
    if job.value(manager) not in MANAGERS:
        job.refuse(manager, f"there are {', '.join(MANAGERS)}", settles)
    else:
        job.tell(manager, "mapped", "", "reward.name")
    for key in [key for key in job.settings if key.startswith("reward.custom_reward_function.")]:
        job.leave("part of the reward function", key)
    if job.value("reward.num_workers") is not None:
        job.set("reward.workers", job.count("reward.num_workers"), "reward.num_workers")
    _overlong(job, max_response_len)


def _overlong(job: Job, max_response_len: int) -> None:
    on, size, factor = f"{OVERLONG}.enable", f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor"
    longest = "reward.reward_kwargs.max_resp_len"
    if job.sets(on) and job.switch(on):
        if job.sets(longest) and job.whole(longest) != max_response_len:
            job.refuse(longest, f"the penalty ends at rollout.max_response_len={max_response_len}")
        if not job.sets(size):
            raise job.wrong(on, f"needs {size} above 0")
        job.set("reward.overlong_buffer_len", job.count(size), size)
        job.tell(on, "mapped", "the penalty counts for advantages only", "reward.overlong_buffer_len")
        if job.sets(factor):
            job.set("reward.overlong_penalty_factor", float(job.number(factor)), factor)
        job.tell(longest, "mapped", "", "rollout.max_response_len")
    job.leave("counts with overlong_buffer_cfg.enable=True", on, size, factor, longest)


def map_critic(job: Job) -> None:
    """The critic of algo=ppo."""
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
    for ours, name in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context")):
        key = f"critic.megatron.{name}_parallel_size"
        if job.sets(key):
            job.set(f"critic.{ours}", job.count(key), key)
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
    """Refuse ``key`` where the critic of verl would have another value than the actor, and leave it out elsewhere."""
    named = or_key if or_key and job.has(or_key) and not job.has(key) else key
    if critic == actor:
        job.leave("the actor's", named)
        return
    text = str(list(actor) if isinstance(actor, tuple) else actor).replace(" ", "")  # pyright: ignore[reportUnknownArgumentType]
    job.refuse(named, f"the critic has the actor's optimizer and schedule, which say {text}: give the critic the same")


def map_run(job: Job) -> None:
    """Folder, checkpoints and loggers."""
    if job.has(f"{MODEL}.path"):
        job.set("model.hf_checkpoint", job.text(f"{MODEL}.path"), f"{MODEL}.path")
    for ours, key in (("run.dir", "trainer.default_local_dir"), ("run.name", "trainer.experiment_name")):
        if job.has(key) and job.settings[key].problem:
            job.leave(f"{job.settings[key].problem}: --with {ours}=...; it has no effect on what is trained", key)
        elif job.sets(key):
            job.set(ours, job.text(key), key)
        job.leave("as verl's default, none", key)
    for ours, key in (
        ("run.save_interval", "trainer.save_freq"),
        ("run.keep_checkpoints", "trainer.max_actor_ckpt_to_keep"),
    ):
        if job.sets(key) and job.whole(key) > 0:
            job.set(ours, job.whole(key), key)
    job.tell("trainer.save_freq", "mapped", "here also after the last rollout", "run.save_interval")
    job.leave("all are kept", "trainer.max_actor_ckpt_to_keep")
    _resume(job)
    _loggers(job)
    dump = "trainer.rollout_data_dir"
    if job.sets(dump) and job.text(dump):
        job.set("run.dump_rollouts", True, dump, "into run.dir/rollouts")
    job.leave("no dump", dump)


def _loggers(job: Job) -> None:
    loggers = job.texts("trainer.logger")
    for name in ("wandb", "tensorboard"):
        if name in loggers or name == "wandb":
            job.set(f"metrics.{name}", name in loggers, "trainer.logger")
    if others := sorted(set(loggers) - {"console", "wandb", "tensorboard"}):
        job.tell(
            "trainer.logger",
            "mapped",
            f"no logger {', '.join(others)}; metrics.jsonl is always written",
            "metrics.wandb",
        )
    job.tell("trainer.logger", "mapped", "", "metrics.wandb")
    project = "trainer.project_name"
    if job.has(project) and job.settings[project].problem:
        job.leave(f"{job.settings[project].problem}: --with metrics.wandb_project=...", project)
    elif "wandb" in loggers:
        job.set("metrics.wandb_project", job.text(project), project)
    job.leave("counts with wandb", project)


def _resume(job: Job) -> None:
    mode = str(job.value("trainer.resume_mode"))
    if mode == "resume_path":
        job.refuse("trainer.resume_mode", "verl's checkpoints are not read: export HF weights", ("run.resume",))
        return
    if mode not in ("auto", "disable"):
        job.refuse("trainer.resume_mode", "there are auto and disable", ("run.resume",))
        return
    job.set("run.resume", "never" if mode == "disable" else "auto", "trainer.resume_mode")
    job.leave("counts with resume_mode=resume_path", "trainer.resume_from_path")
