"""Rewards of a verl job in our keys."""

from __future__ import annotations

from pathlib import Path

from slime_like.config.schema.render import render
from slime_like_compat.verl.defaults import OVERLONG
from slime_like_compat.verl.job import Job

MANAGERS = ("naive", "dapo", "prime")


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
