"""Metrics of slime and verl with our name for each, and other projects' names for some of our config keys.

``verl_keys`` has verl's configuration keys.

Sources: ``slime/observability`` and ``slime/backends/megatron_utils`` of slime 0.3.1,
``verl/trainer/ppo/metric_utils.py`` of verl 0.9.0.
"""

from __future__ import annotations

SLIME_METRICS: dict[str, str] = {
    "rollout/raw_reward": "rollout/raw_reward",
    "rollout/response_len/mean": "rollout/response_len/mean",
    "rollout/response_len/median": "rollout/response_len/median",
    "rollout/response_len/max": "rollout/response_len/max",
    "rollout/response_len/min": "rollout/response_len/min",
    "rollout/truncated_ratio": "rollout/truncated_ratio",
    "rollout/zero_std/count_*": "rollout/zero_std_ratio",
    "rollout/rollout_log_probs": "rollout/log_probs",
    "rollout/dynamic_filter/drop_*": "rollout/dropped_groups/<filter>",
    "train/loss": "train/loss",
    "train/pg_loss": "train/pg_loss",
    "train/pg_clipfrac": "train/pg_clipfrac",
    "train/ppo_kl": "train/ppo_kl",
    "train/kl_loss": "train/kl_loss",
    "train/entropy_loss": "train/entropy_loss",
    "train/ois": "train/ois",
    "train/tis": "train/tis",
    "train/tis_abs": "train/tis_abs",
    "train/tis_clipfrac": "train/tis_clipfrac",
    "train/train_rollout_logprob_abs_diff": "train/train_rollout_logprob_abs_diff",
    "train/grad_norm": "train/grad_norm",
    "train/lr-pg_0": "train/lr",
    "train/critic-grad_norm": "train/critic_grad_norm",
    "perf/rollout_time": "perf/rollout_time",
    "perf/tokens_per_gpu_per_sec": "perf/tokens_per_gpu_per_sec",
    "perf/actor_train_time": "perf/actor_train_time",
    "perf/log_probs_time": "perf/log_probs_time",
    "perf/ref_log_probs_time": "perf/ref_log_probs_time",
    "perf/update_weights_time": "perf/update_weights_time",
    "perf/train_wait_time": "perf/train_wait_time",
    "perf/step_time": "perf/step_time",
    "eval/<name>": "eval/<dataset>",
    "eval/<name>-truncated_ratio": "eval/<dataset>-truncated_ratio",
    "eval/<name>-pass@k": "eval/<dataset>-pass@<k>",
    "eval/<name>/response_len/mean": "eval/<dataset>/response_len/mean",
}
"""slime's metric -> ours; most have the same name."""

VERL_METRICS: dict[str, str] = {
    "critic/score/mean, critic/rewards/mean": "rollout/raw_reward",
    "response_length/mean": "rollout/response_len/mean",
    "response_length/max": "rollout/response_len/max",
    "response_length/min": "rollout/response_len/min",
    "response_length/clip_ratio": "rollout/truncated_ratio",
    "val-core/<source>/acc/mean@k": "eval/<dataset>",
    "actor/pg_loss": "train/pg_loss",
    "actor/pg_clipfrac": "train/pg_clipfrac",
    "actor/pg_clipfrac_lower": "train/pg_clipfrac_lower",
    "actor/ppo_kl": "train/ppo_kl",
    "actor/kl_loss": "train/kl_loss",
    "actor/entropy": "train/entropy",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "critic/vf_loss": "train/value_loss",
    "critic/vf_clipfrac": "train/value_clipfrac",
    "critic/values/mean": "train/values",
    "critic/returns/mean": "train/returns",
    "critic/vf_explained_var": "train/explained_variance",
    "training/rollout_probs_diff_mean": "train/train_rollout_logprob_abs_diff",
    "training/rollout_probs_diff_max": "train/train_rollout_logprob_abs_diff_max",
    "rollout_corr/k3_kl": "train/train_rollout_kl_k3",
    "training/off_policy/trajectory_staleness/max": "rollout/staleness_max",
    "timing_s/gen": "perf/rollout_time",
    "timing_s/update_actor": "perf/actor_train_time",
    "timing_s/old_log_prob": "perf/log_probs_time",
    "timing_s/ref": "perf/ref_log_probs_time",
    "timing_s/step, perf/time_per_step": "perf/step_time",
    "perf/total_num_tokens": "train/num_tokens",
}
"""verl's metric -> ours. ``training/rollout_probs_diff_*`` compare probabilities, and our metrics log-probabilities."""

OTHER_KEYS: dict[str, str] = {
    "algo.clip_range": "algo.eps_clip",
    "algo.clip_ratio": "algo.eps_clip",
    "algo.cliprange": "algo.eps_clip",
    "algo.gae_lambda": "algo.lambd",
}
"""Common name elsewhere -> our key. ``clip_ratio`` is verl's key, ``cliprange`` the argument of its loss."""
