"""Translation of a verl job's keys for lengths, sampling and group filters to keys of slime_like."""

from __future__ import annotations

from slime_like_compat.verl.defaults import ROLLOUT
from slime_like_compat.verl.job import Job
from slime_like_compat.verl.rewards import penalizes_length

NO_LIMIT = 1_000_000
AFTER_PENALTY = ("reward", "seq_reward", "seq_final_reward")
METRICS = ("acc", "score", *AFTER_PENALTY)
"""Metrics by which verl filters groups: fields of the reward function's result, or sums of the token rewards
(``reward`` in verl 0.9.1, the others in recipe.dapo)."""


def lengths(job: Job) -> tuple[int, int]:
    """Return the maximum number of tokens of a prompt and of a response."""
    prompt, response = f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"
    return (
        job.count(prompt if job.sets(prompt) else "data.max_prompt_length"),
        job.count(response if job.sets(response) else "data.max_response_length"),
    )


def map_rollout(job: Job) -> None:
    """Set the keys of lengths, sampling and group filters."""
    prompt, response = lengths(job)
    for our_key, keys, value in (
        ("data.max_prompt_len", (f"{ROLLOUT}.prompt_length", "data.max_prompt_length"), prompt),
        ("rollout.max_response_len", (f"{ROLLOUT}.response_length", "data.max_response_length"), response),
    ):
        job.set(our_key, value, keys[0] if job.sets(keys[0]) else keys[1])
        job.leave_out(f"{keys[0]} counts", keys[1])
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
    job.set("rollout.top_k", job.integer(f"{ROLLOUT}.top_k"), f"{ROLLOUT}.top_k")
    _filter_groups(job)


def _filter_groups(job: Job) -> None:
    on, metric, rounds = (f"algorithm.filter_groups.{n}" for n in ("enable", "metric", "max_num_gen_batches"))
    if not job.switch(on):
        job.leave_out("off", on, metric, rounds)
        return
    name = job.value(metric)
    if name is None and not job.dropped(metric):
        raise job.needs(on, metric, "acc")
    job.set("rollout.filters", ["nonzero_std"], on)
    job.set("rollout.max_refills", NO_LIMIT, on, "verl's own loop has no limit")
    job.leave_out("verl's own loop ignores it; if yours stops after N batches: --with rollout.max_refills=N-1", rounds)
    note = "groups of equal rewards are dropped, before the penalty on long answers and the KL in the reward"
    after_penalty = name in AFTER_PENALTY and penalizes_length(job)
    after_kl = name == "seq_final_reward" and job.switch("algorithm.use_kl_in_reward")
    if name not in (None, *METRICS):
        job.refuse(metric, f"groups are filtered by their rewards: one of {', '.join(METRICS)}")
    elif after_penalty or after_kl:
        job.refuse(metric, f"{note}: acc or score")
    job.report(metric, "mapped", note, "rollout.filters")
