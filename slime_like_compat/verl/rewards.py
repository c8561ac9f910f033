"""Rewards of a verl job in our keys."""

from __future__ import annotations

from slime_like.config.schema.render import render
from slime_like_compat.verl.defaults import OVERLONG
from slime_like_compat.verl.job import Job

MANAGERS = ("naive", "dapo", "prime")
_MANAGER = "reward.reward_manager.name"


def map_rewards(job: Job, max_response_len: int) -> None:
    """Set the reward, which has to be named: verl chooses it by the column ``data_source`` of each row, or runs a file."""
    by_row, own_function = "data.reward_fn_key", "reward.custom_reward_function.path"
    settles = ("reward.name", "reward.weights")
    if job.value(own_function) is not None and not any(name in job.user_overrides for name in settles):
        function = "reward.custom_reward_function.name"
        name = job.text(function) if job.sets(function) else "compute_score"
        job.overrides["reward.name"] = render(f"{job.text(own_function)}:{name}")
        job.tell(own_function, "code", "a RewardFn of slime_like/interfaces.py (docs/rewards.md)", "reward.name")
        job.leave("reward.name scores every row", by_row)
    elif job.value(own_function) is not None:
        job.refuse(own_function, "", settles)
        job.leave("reward.name scores every row", by_row)
    else:
        reason = (
            "verl chooses the reward by this column of each row (data_source): name one, or write rm_type into the rows"
        )
        job.refuse(by_row, reason, settles)
        job.leave("no function of its own", own_function)
    if job.value(_MANAGER) not in MANAGERS:
        job.refuse(_MANAGER, f"there are {', '.join(MANAGERS)}", settles)
    else:
        job.tell(_MANAGER, "mapped", "", "reward.name")
    for key in [key for key in job.settings if key.startswith("reward.custom_reward_function.")]:
        job.leave("part of the reward function", key)
    if job.value("reward.num_workers") is not None:
        job.set("reward.workers", job.count("reward.num_workers"), "reward.num_workers")
    _overlong(job, max_response_len)


def penalizes_length(job: Job) -> bool:
    """Return whether verl takes a penalty off the rewards of long answers."""
    on = f"{OVERLONG}.enable"
    return job.sets(on) and job.switch(on) and (_of_recipe(job) or job.value(_MANAGER) == "dapo")


def _of_recipe(job: Job) -> bool:
    """Return whether the penalty is given as in recipe.dapo, which has the manager and the longest response by itself."""
    return job.settings[f"{OVERLONG}.enable"].name.startswith("reward_model.overlong_buffer.")


def _overlong(job: Job, max_response_len: int) -> None:
    on, size, factor = f"{OVERLONG}.enable", f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor"
    longest = "reward.reward_kwargs.max_resp_len"
    if not penalizes_length(job):
        reason = f"read only with overlong_buffer_cfg.enable=True and {_MANAGER}=dapo, in verl as well"
        job.leave(reason, on, size, factor, longest)
        return
    for key, example in ((size, 512), (factor, 1.0), (longest, max_response_len)):
        if not job.sets(key) and not (key == longest and _of_recipe(job)):
            raise job.needs(on, key, example)
    if job.sets(longest) and job.whole(longest) != max_response_len:
        job.refuse(longest, f"the penalty ends at rollout.max_response_len={max_response_len}")
    job.set("reward.overlong_buffer_len", job.count(size), size)
    job.set("reward.overlong_penalty_factor", float(job.number(factor)), factor)
    job.tell(on, "mapped", "the penalty counts for advantages only", "reward.overlong_buffer_len")
    job.tell(longest, "mapped", "", "rollout.max_response_len")
