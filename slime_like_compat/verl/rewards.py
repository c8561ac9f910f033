"""Translation of a verl job's keys for rewards to keys of slime_like."""

from __future__ import annotations

from slime_like.config.schema.render import render
from slime_like_compat.verl.defaults import OVERLONG
from slime_like_compat.verl.job import Job

MANAGERS = ("naive", "dapo", "prime")
_MANAGER = "reward.reward_manager.name"


def map_rewards(job: Job, max_response_len: int) -> None:
    """Set the keys of the reward, its workers and the penalty on long responses.

    If the job names no function, verl chooses one of its own rewards for each row, by the column that data.reward_fn_key names.
    That key is refused, unless the user names the reward with ``--with`` or drops the key.
    """
    by_row, own_function = "data.reward_fn_key", "reward.custom_reward_function.path"
    alternatives = ("reward.name", "reward.weights")
    if job.value(own_function) is not None and not any(name in job.user_overrides for name in alternatives):
        function = "reward.custom_reward_function.name"
        name = job.text(function) if job.sets(function) else "compute_score"
        job.overrides["reward.name"] = render(f"{job.text(own_function)}:{name}")
        job.report(own_function, "code", "a RewardFn of slime_like/interfaces.py (docs/rewards.md)", "reward.name")
        job.leave_out("reward.name scores every row", by_row)
    elif job.value(own_function) is not None:
        job.refuse(own_function, "", alternatives)
        job.leave_out("reward.name scores every row", by_row)
    else:
        reason = (
            "verl chooses the reward by this column of each row (data_source): name one, or write rm_type into the rows"
        )
        job.refuse(by_row, reason, alternatives)
        job.leave_out("the job has no reward function", own_function)
    if job.value(_MANAGER) not in MANAGERS:
        job.refuse(_MANAGER, f"one of {', '.join(MANAGERS)}", alternatives)
    else:
        job.report(_MANAGER, "mapped", "", "reward.name")
    for key in [key for key in job.settings if key.startswith("reward.custom_reward_function.")]:
        job.leave_out("part of the reward function", key)
    if job.value("reward.num_workers") is not None:
        job.set("reward.workers", job.count("reward.num_workers"), "reward.num_workers")
    _overlong(job, max_response_len)


def penalizes_length(job: Job) -> bool:
    """Return whether verl subtracts a penalty from the rewards of long responses."""
    switch = f"{OVERLONG}.enable"
    return job.sets(switch) and job.switch(switch) and (_is_dapo_recipe(job) or job.value(_MANAGER) == "dapo")


def _is_dapo_recipe(job: Job) -> bool:
    """Return whether the job, which must have the switch of the penalty, names it as recipe.dapo does.

    That recipe itself sets the reward manager and the maximum response length.
    """
    return job.settings[f"{OVERLONG}.enable"].name.startswith("reward_model.overlong_buffer.")


def _overlong(job: Job, max_response_len: int) -> None:
    switch, size, factor = f"{OVERLONG}.enable", f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor"
    max_len = "reward.reward_kwargs.max_resp_len"
    if not penalizes_length(job):
        reason = f"read only with overlong_buffer_cfg.enable=True and {_MANAGER}=dapo, in verl as well"
        job.leave_out(reason, switch, size, factor, max_len)
        return
    for key, example in ((size, 512), (factor, 1.0), (max_len, max_response_len)):
        if not job.sets(key) and not (key == max_len and _is_dapo_recipe(job)):
            raise job.needs(switch, key, example)
    if job.sets(max_len) and job.integer(max_len) != max_response_len:
        job.refuse(max_len, f"the penalty ends at rollout.max_response_len: give {max_response_len}")
    job.set("reward.overlong_buffer_len", job.count(size), size)
    job.set("reward.overlong_penalty_factor", float(job.number(factor)), factor)
    job.report(switch, "mapped", "the penalty affects advantages only", "reward.overlong_buffer_len")
    job.report(max_len, "mapped", "", "rollout.max_response_len")
