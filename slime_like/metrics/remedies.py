"""Advice for values outside a metric's healthy range, by the name of the metric's entry in ``dictionary``."""

from __future__ import annotations

REMEDIES = {
    "rollout/raw_reward": "flat from the start: read samples in report.html; check the reward and the difficulty of the "
    "prompts (rollout/zero_std_ratio); falls later: lower optim.lr, add a KL term",
    "rollout/accuracy": "as rollout/raw_reward; if the reward rises and accuracy does not, the policy exploits the reward",
    "rollout/num_samples": "rollout/dropped_groups counts groups per filter; rollout.max_refills above 0 replaces dropped groups",
    "rollout/empty_in_a_row": "rollout/dropped_groups counts the groups that filters drop; the warning quotes a sample",
    "rollout/without_signal_in_a_row": "read the sample that the warning quotes; check reward, prompts and the format of "
    "responses",
    "rollout/generated/raw_reward": "as rollout/raw_reward",
    "rollout/generated/accuracy": "as rollout/accuracy",
    "rollout/truncated_ratio": "raise rollout.max_response_len, or set reward.overlong_buffer_len",
    "rollout/aborted_ratio": "read logs/engine_*.log",
    "rollout/zero_std_ratio": "choose other prompts, raise rollout.n_samples_per_prompt, or set rollout.filters=[nonzero_std]",
    "rollout/log_probs": "near 0: the policy has collapsed to one answer (train/entropy); falls: lower optim.lr",
    "rollout/staleness_max": "a bug: please report it",
    "rollout/mixed_version_ratio": "high: lower rollout.over_sampling_batch_size; algo.use_tis corrects for old tokens, "
    "algo.mask_offpolicy excludes them",
    "rollout/stopped_groups": "0: all groups end at the same time, so rollout.over_sampling_batch_size has no benefit",
    "rollout/restarted_groups": "lower rollout.over_sampling_batch_size or raise rollout.max_partial_staleness",
    "rollout/wasted_tokens": "rollout.partial_rollout=true keeps them",
    "rollout/engine_load_max": "use smaller groups (rollout.n_samples_per_prompt), or more of them",
    "rollout/kv_usage": "near 1: more concurrent requests do not fit; raise rollout.sglang.mem_fraction_static or rollout.tp, or set "
    "rollout.dcp if rollout.tp exceeds the model's KV heads",
    "rollout/retractions": "set rollout.max_running_requests=auto, or a lower number",
    "rollout/dcp_exchange_time": "set rollout.dcp=1 if rollout/kv_usage stays low; otherwise try the other value of "
    "rollout.dcp_comm or, on a CPU, rollout.dcp_replicate_q=true",
    "rollout/kv_engines_without_report": "as rollout/engine_restarts; the warning names the engines",
    "rollout/refills": "the prompts have become too easy, or are too hard: choose other prompts; rollout/dropped_groups gives "
    "the reasons",
    "rollout/engine_restarts": "read logs/engine_*.log; if health checks fail because the machine is slow: raise "
    "health.timeout_s",
    "rollout/remade_groups": "as rollout/engine_restarts",
    "rollout/overlong_penalty": "raise rollout.max_response_len",
    "agent/further_samples": "the agent changes earlier messages (trims, summarises, drops reasoning), and each change starts "
    "another sample; keep the history unchanged if possible",
    "agent/failures": "read the warning with the line that raised; failed runs are not trained on",
    "agent/timeouts": "raise rollout.agent_deadline_s, or set timeouts in the agent",
    "reward/timeouts": "make the reward faster, raise reward.timeout_s or reward.workers; the samples get reward.fallback",
    "reward/killed": "the warning names signal and reward; raise reward.memory_gb, or lower reward.workers if the machine is "
    "short of memory",
    "reward/remote_failures": "check the reward server; the warning in the run's output quotes its response",
    "reward/remote_retries": "the server is overloaded: lower reward.remote_concurrency",
    "reward/fallbacks": "reward/timeouts, reward/killed and reward/remote_failures count the kinds",
    "data/bad_rows": "data.on_bad_row=stop names the first one",
    "train/sft_loss": "flat: raise optim.lr; rises again: fewer epochs",
    "train/pg_clipfrac": "lower optim.lr or loop.steps_per_rollout",
    "train/pg_clipfrac_lower": "as train/pg_clipfrac",
    "train/ppo_kl": "not 0 with loop.steps_per_rollout=1: if algo.use_rollout_logprobs is set, as "
    "train/train_rollout_logprob_abs_diff, otherwise report it; far from 0 with more steps: lower loop.steps_per_rollout or optim.lr",
    "train/ois": "as train/ppo_kl",
    "train/seq_ratio_max": "lower algo.eps_clip; look at the longest samples",
    "train/entropy_loss": "falls to 0 early: raise algo.entropy_coef or algo.eps_clip_high, lower optim.lr; rises: the policy "
    "diverges, lower optim.lr",
    "train/entropy": "as train/entropy_loss",
    "train/tis": "as train/train_rollout_logprob_abs_diff; tokens of older weights (rollout/staleness_max) also move it away from 1",
    "train/tis_abs": "as train/tis",
    "train/tis_clipfrac": "as train/tis; raise algo.tis_clip only when the cause is known",
    "train/mis": "as train/tis",
    "train/mis_abs": "as train/tis",
    "train/mis_maskfrac_low": "as train/tis",
    "train/mis_maskfrac_high": "as train/tis",
    "train/rejection_ratio": "as train/tis",
    "train/rejection_frac": "as train/tis: much of the batch is dropped",
    "train/value_loss": "rises: lower critic.lr",
    "train/critic_loss": "as train/value_loss",
    "train/value_clipfrac": "lower critic.lr",
    "train/values": "raise critic.warmup_rollouts or critic.lr",
    "train/explained_variance": "raise critic.warmup_rollouts or critic.lr; check that the reward is not noise",
    "train/teacher_kl": "rises: lower optim.lr; flat: check that the teacher has the same tokenizer and chat template",
    "train/moe_load": "raise model.megatron.moe_aux_loss_coeff",
    "train/moe_aux_loss": "raise model.megatron.moe_aux_loss_coeff",
    "train/routed_experts_differ": "as train/train_rollout_logprob_abs_diff; with loop.max_staleness above 0 or "
    "rollout.partial_rollout it includes the change of the routers since the tokens were sampled",
    "probe/routed_experts_differ": "as probe/logprob_abs_diff_max",
    "probe/routed_experts_gap_max": "the engine's routers have other weights, or experts of other tokens were returned: read "
    "the error",
    "train/off_policy_token_ratio": "a bug: please report it",
    "train/train_rollout_logprob_abs_diff": "see the causes in report.html; weights.probe_layers=true separates the trainer's "
    "rounding from the engine's; set algo.use_tis=true until the cause is known",
    "train/train_rollout_logprob_abs_diff_max": "as train/train_rollout_logprob_abs_diff; the error names the samples; in "
    "bfloat16, the largest difference is often that of a token of very low probability",
    "train/train_rollout_logprob_abs_diff_mixed": "much above train_rollout_logprob_abs_diff: the engine continues samples on "
    "keys and values of older weights; report it",
    "train/train_rollout_kl_k3": "as train/train_rollout_logprob_abs_diff",
    "probe/logprob_abs_diff_max": "the push was incomplete, or engine and trainer compute differently: read the error; "
    "weights.probe_layers=true",
    "probe/decode_logprob_abs_diff_max": "read the error: keys and values of older weights were reused, or decode and prefill "
    "compute differently; rollout.cpu_kernels=off on a CPU, other attention backends on a"
    " GPU",
    "probe/prefix_cache_hit_rate": "0 with the cache on: the probe does not test the cache; please report it",
    "eval/<dataset>": "if only training accuracy rises: more prompts, fewer epochs, a KL term",
    "eval/<dataset>-pass@<k>": "pass@1 rises while the largest k falls: responses become less diverse, see train/entropy",
    "comm/<group>/<op>/clears": "lower guard.threshold, or give engines less memory: scripts/profile_comm.py",
    "guard/time": "lower guard.budget (guard.checks=auto), raise guard.every (guard.checks=every_n), or guard fewer ops: "
    "scripts/profile_comm.py",
    "guard/shortages": "give engines less memory (rollout.sglang.mem_fraction_static), lower parallel.max_tokens_per_rank",
    "guard/clears": "as guard/shortages",
    "guard/free_bytes": "as guard/shortages",
    "memory/<phase>": "compare the phases: the phase that grows first has the leak; please report it",
    "perf/train_wait_time": "raise rollout.num_engines, lower rollout.max_response_len; if rollouts are synchronous: set "
    "loop.max_staleness=1",
}
