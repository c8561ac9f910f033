"""Translation of a verl job's keys for algorithm, loss and off-policy correction to keys of slime_like.

A setting that selects a formula without a counterpart here is refused.
"""

from __future__ import annotations

import math
from typing import Any

from slime_like_compat.verl.defaults import ACTOR, CORRECTION, ROLLOUT
from slime_like_compat.verl.job import Job

GROUP_ESTIMATORS = {"grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo"}
TOKEN_ESTIMATORS = {
    "gae": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "dr_grpo",
}
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k2+": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
"""verl's KL estimators -> ours; verl clamps k3 at 10 under both of its names, like our ``low_var_kl``."""
REJECTIONS = {"seq_sum_k1": "product", "seq_mean_k1": "geometric"}
_MODE, _ESTIMATOR = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"


def map_algorithm(job: Job, max_response_len: int) -> None:
    """Set ``job.algo``, which later translations read, and the keys of advantage, loss, KL and off-policy correction.

    Raises ``ConfigError`` if a value is wrong or settings conflict.
    """
    _choose(job)
    _clip(job)
    _aggregate(job, max_response_len)
    job.set("algo.entropy_coef", float(job.number(f"{ACTOR}.entropy_coeff")), f"{ACTOR}.entropy_coeff")
    _kl_in_loss(job)
    _kl_in_reward(job)
    _correct(job)


def _choose(job: Job) -> None:
    estimator, mode = str(job.value(_ESTIMATOR)), str(job.value(_MODE))
    group = GROUP_ESTIMATORS.get(estimator)
    job.algo = TOKEN_ESTIMATORS.get(estimator, "rloo" if group == "rloo" else "grpo")
    if estimator not in GROUP_ESTIMATORS | TOKEN_ESTIMATORS:
        known_names = ", ".join(GROUP_ESTIMATORS | TOKEN_ESTIMATORS)
        job.refuse(_ESTIMATOR, f"the advantage is not supported: one of {known_names}")
    if mode in ("gspo", "cispo") and group is not None:
        job.algo = mode
        job.report(_MODE, "mapped", "", "algo")
    elif mode != "vanilla":
        reason = (
            f"supported with {_ESTIMATOR}={' or '.join(GROUP_ESTIMATORS)} only"
            if mode in ("gspo", "cispo")
            else "the loss is not supported: one of vanilla, gspo and cispo"
        )
        job.refuse(_MODE, reason)
    else:
        job.report(_MODE, "mapped", "", "algo")
    job.set("algo", job.algo, _ESTIMATOR)
    std = job.switch("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo":
        job.set("algo.group_advantage", "grpo" if std else "dr_grpo", "algorithm.norm_adv_by_std_in_grpo")
    else:
        job.leave_out(f"adv_estimator={estimator} does not read it", "algorithm.norm_adv_by_std_in_grpo")
        if group is not None:
            job.set("algo.group_advantage", group, _ESTIMATOR)
    for name, key in (("gamma", "algorithm.gamma"), ("lambd", "algorithm.lam")):
        if name in ("gamma", "lambd")[: {"ppo": 2, "reinforce_pp": 1}.get(job.algo, 0)]:
            job.set(f"algo.{name}", float(job.number(key)), key)
        else:
            job.leave_out(f"adv_estimator={estimator} does not read it", key)


def _clip(job: Job) -> None:
    low, high, symmetric = (f"{ACTOR}.clip_ratio{end}" for end in ("_low", "_high", ""))
    plain = job.number(symmetric) if job.sets(symmetric) else 0.2
    for our_key, key in (("algo.eps_clip", low), ("algo.eps_clip_high", high)):
        if job.value(key) is None:
            job.set(our_key, float(plain), key, "clip_ratio")
        else:
            job.set(our_key, float(job.number(key)), key)
    job.leave_out("verl reads it only where clip_ratio_low or clip_ratio_high is null", symmetric)
    bound_key = f"{ACTOR}.clip_ratio_c"
    if job.algo in ("gspo", "cispo"):
        job.leave_out(f"verl's {job.algo} does not read it", bound_key)
    else:
        job.set("algo.eps_clip_c", float(job.number(bound_key)), bound_key)


def _aggregate(job: Job, max_response_len: int) -> None:
    key, factor = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    mode = str(job.value(key))
    scale = job.value(factor)
    if job.algo == "gspo":
        differs = mode != "seq-mean-token-mean" and (
            job.switch(f"{ACTOR}.use_kl_loss") or job.number(f"{ACTOR}.entropy_coeff")
        )
        if differs and not job.has(key):
            job.refuse(key, "gspo aggregates KL and entropy like the loss here: give loss_agg_mode=seq-mean-token-mean")
        elif differs:
            job.refuse(key, "gspo aggregates KL and entropy like the loss here: by seq-mean-token-mean")
        job.report(key, "mapped", "gspo's loss is a mean over sequences in verl as well", "algo.aggregation")
    elif mode not in AGGREGATIONS:
        hint = " (seq-mean-token-sum-norm divides it by max_response_len)" if mode == "seq-mean-token-sum" else ""
        job.refuse(key, f"the aggregation is not supported: one of {', '.join(AGGREGATIONS)}{hint}")
    elif mode == "seq-mean-token-sum-norm" and scale not in (None, max_response_len):
        job.refuse(factor, f"token losses are divided by rollout.max_response_len: give {max_response_len}")
    else:
        note = ""
        if mode == "seq-mean-token-sum-norm" and scale is None:
            note = "verl divides by the longest response of a micro-batch, here by rollout.max_response_len"
        job.set("algo.aggregation", AGGREGATIONS[mode], key, note)
        job.report(factor, "mapped", "rollout.max_response_len", "algo.aggregation")
    job.leave_out(f"loss_agg_mode={mode} does not read it", factor)


def _kl_in_loss(job: Job) -> None:
    coef, kind, switch = f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", f"{ACTOR}.use_kl_loss"
    if not job.switch(switch) or not job.number(coef):
        reason = "use_kl_loss=True" if not job.switch(switch) else "a kl_loss_coef above 0"
        job.leave_out(f"has no effect without {reason}, in verl as well", coef, kind)
        job.report(switch, "mapped", "no KL to the reference in the loss", "algo.kl_loss_coef")
        return
    job.set("algo.kl_loss_coef", float(job.number(coef)), coef)
    job.report(switch, "mapped", "", "algo.kl_loss_coef")
    estimator = KL.get(str(job.value(kind)))
    if estimator is None:
        job.refuse(kind, f"the estimator is not supported: one of {', '.join(KL)}")
    else:
        job.set("algo.kl_loss_type", estimator, kind)


def _kl_in_reward(job: Job) -> None:
    switch, coef, kind, control = (
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_penalty",
        "algorithm.kl_ctrl.type",
    )
    other_keys = (kind, control, "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")
    if not job.switch(switch) or not job.number(coef):
        reason = "use_kl_in_reward=True" if not job.switch(switch) else "a kl_coef above 0"
        job.leave_out(f"has no effect without {reason}, in verl as well", coef, *other_keys)
        job.leave_out("no KL in the reward", switch)
        return
    if job.algo not in ("ppo", "reinforce_pp"):
        job.refuse(
            switch, f"algo={job.algo} does not subtract a KL from the reward: use_kl_loss=True adds it to the loss"
        )
    else:
        job.set("algo.kl_coef", float(job.number(coef)), coef)
        estimator = KL.get(str(job.value(kind)).removesuffix("+"))
        if estimator is None:
            job.refuse(kind, f"the estimator is not supported: one of {', '.join(KL)}")
        else:
            job.set("algo.kl_reward_type", estimator, kind)
        job.report(switch, "mapped", "", "algo.kl_coef")
    if job.value(control) != "fixed":
        job.refuse(control, "the KL coefficient is constant: kl_ctrl.type=fixed")
    job.leave_out("part of use_kl_in_reward", coef, *other_keys)


def _correct(job: Job) -> None:
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    weight, limit, normal, reject, bounds = (f"{CORRECTION}.{name}" for name in names)
    bypass, kind = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"
    logprobs = f"{ROLLOUT}.calculate_log_probs"
    has_logprobs = job.switch(logprobs)
    job.leave_out("the engine reports log-probabilities of every token", logprobs)
    if not has_logprobs and job.switch(bypass):
        raise job.wrong(bypass, f"needs {logprobs}=True")
    if not has_logprobs:
        reason = f"has no effect with {logprobs}=False, in verl as well"
        job.leave_out(reason, bypass, kind, weight, limit, normal, reject, bounds)
        return
    if job.switch(bypass):
        _bypass(job, bypass, kind, reject)
        job.leave_out("has no effect with bypass_mode and loss_type=ppo_clip, in verl as well", weight, limit, normal)
        job.leave_out("rollout_rs is off", reject, bounds)
        return
    job.leave_out("old log-probabilities are the trainer's", bypass, kind)
    match job.value(weight):
        case None:
            job.leave_out("off", weight, limit, normal)
        case "token":
            _importance(job, weight, limit)
        case _:
            job.refuse(weight, "importance weights are per token here: rollout_is=token")
    if job.switch(normal) and job.value(weight) is not None:
        job.refuse(normal, "importance weights are not normalised over the batch: rollout_is_batch_normalize=False")
    job.leave_out("off", normal)
    _reject(job, reject, bounds)


def _bypass(job: Job, bypass: str, kind: str, reject: str) -> None:
    if job.value(kind) != "ppo_clip":
        job.refuse(kind, "REINFORCE without clipping is not supported: loss_type=ppo_clip")
    if job.value(reject) is not None:
        job.refuse(reject, "rejection compares the trainer's old policy with the engine's: bypass_mode=False")
    if job.value(_MODE) != "vanilla":
        job.refuse(
            bypass, f"with it, verl trains with the loss of PPO instead of {job.value(_MODE)}: bypass_mode=False"
        )
    job.set("algo.use_rollout_logprobs", True, bypass)
    job.report(kind, "mapped", "", "algo.use_rollout_logprobs")


def _importance(job: Job, weight: str, limit: str) -> None:
    low, high = _bounds(job, limit, job.value(limit))
    if low is None:
        job.set("algo.use_tis", True, weight)
        job.set("algo.tis_clip", high, limit)
    else:
        job.set("algo.use_mis", True, weight)
        job.set("algo.mis_low", low, limit)
        job.set("algo.mis_high", high, limit)


def _reject(job: Job, reject: str, bounds: str) -> None:
    criteria = [name.strip() for name in ",".join(job.texts(reject)).split(",") if name.strip()]
    if not criteria:
        job.leave_out("off", reject, bounds)
        return
    texts = [text.strip() for text in ",".join(job.texts(bounds)).split(",") if text.strip()]
    if not texts:
        raise job.needs(reject, bounds, "0.5_2.0")
    if len(criteria) > 1 or criteria[0] not in REJECTIONS or len(texts) != 1:
        known_names = " or ".join(REJECTIONS)
        job.refuse(reject, f"only one criterion, for sequences, is supported: {known_names}")
        job.leave_out("read only with rollout_rs", bounds)
        return
    low, high = _bounds(job, bounds, texts[0])
    low = 1 / high if low is None else low
    job.set("algo.rejection", REJECTIONS[criteria[0]], reject)
    note = "verl bounds the ratio rollout / old policy, this project old policy / rollout"
    job.set("algo.rejection_low", 1 / high, bounds, note)
    job.set("algo.rejection_high", 1 / low, bounds, note)


def _bounds(job: Job, key: str, value: Any) -> tuple[float | None, float]:
    """Parse an upper bound, ``2.0``, or both, ``0.5_2.0``. Raises ``ConfigError`` unless they are finite numbers above 0."""
    low, _, high = str(value).rpartition("_")
    try:
        bounds = (float(low) if low else None, float(high))
    except ValueError as error:
        raise job.wrong(key, "is neither a number nor two numbers, as in 0.5_2.0") from error
    if not all(0 < bound < math.inf for bound in bounds if bound is not None):
        raise job.wrong(key, "must be finite and above 0")
    return bounds
