"""Table of all metrics. ``docs/metrics.md`` is generated from it; an end-to-end test fails on a metric without an entry.

An entry with ``healthy`` has a remedy in ``remedies``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from slime_like.metrics.remedies import REMEDIES


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """Description of a metric. A part ``<x>`` of ``name`` matches any text; ``healthy`` is the expected range."""

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""

    @property
    def remedy(self) -> str:
        """Return the advice for a value outside ``healthy``."""
        return REMEDIES.get(self.name, "")

    def matches(self, name: str) -> bool:
        """Return whether this entry describes the metric ``name``."""
        return re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.sub(r"([.+*?|()])", r"\\\1", self.name)), name) is not None


ENTRIES = (
    MetricEntry("rollout/raw_reward", "mean reward of the samples trained on, after filters", "", "rises"),
    MetricEntry("rollout/accuracy", "share of correct responses of these samples", "0 to 1", "rises"),
    MetricEntry(
        "rollout/num_samples", "samples trained on", "", "batch_size * n_samples_per_prompt unless filters drop some"
    ),
    MetricEntry("rollout/response_len/mean", "mean length of a response", "tokens"),
    MetricEntry("rollout/response_len/median", "median length of a response", "tokens"),
    MetricEntry("rollout/response_len/max", "longest response", "tokens"),
    MetricEntry("rollout/response_len/min", "shortest response", "tokens"),
    MetricEntry(
        "rollout/num_turns", "mean number of turns in which the model wrote; 1 without tools, environments and agents"
    ),
    MetricEntry(
        "rollout/truncated_ratio",
        "share of responses cut at max_response_len",
        "0 to 1",
        "small; if it grows, raise max_response_len",
    ),
    MetricEntry("rollout/aborted_ratio", "share of responses that were aborted", "0 to 1", "0"),
    MetricEntry(
        "rollout/zero_std_ratio",
        "share of groups whose rewards are all equal; their group advantages are 0",
        "0 to 1",
        "below 0.9",
    ),
    MetricEntry(
        "rollout/log_probs",
        "mean log-probability of sampled tokens under the policy that sampled them",
        "nats",
        "rises slowly",
    ),
    MetricEntry(
        "rollout/staleness_max",
        "trainer version minus the version of a group's oldest token, maximum over groups",
        "versions",
        "at most loop.max_staleness, 1 more with loop.leftover=carry; with partial rollouts at most rollout.max_partial_staleness",
    ),
    MetricEntry("rollout/staleness_mean", "the same, mean over groups", "versions"),
    MetricEntry(
        "rollout/mixed_version_ratio",
        "share of samples whose tokens were sampled under several weight versions",
        "0 to 1",
        "0 unless rollouts are partial or asynchronous",
    ),
    MetricEntry(
        "rollout/stopped_groups",
        "groups that over-sampling aborted because the rollout was full; partial rollouts continue them",
        "groups",
        "about rollout.over_sampling_batch_size minus rollout.batch_size",
    ),
    MetricEntry(
        "rollout/restarted_groups",
        "aborted groups that were too old to be continued; their prompts are sampled again",
        "groups",
        "0",
    ),
    MetricEntry(
        "rollout/wasted_tokens",
        "tokens sampled for groups that were then discarded",
        "tokens",
        "0 with partial rollouts",
    ),
    MetricEntry(
        "rollout/prefix_cache_hit_rate",
        "share of prompt tokens, continuations included, whose keys and values were in the engine's prefix cache",
        "0 to 1",
    ),
    MetricEntry("rollout/avg_cached_tokens_per_sample", "cached tokens per request of one sample", "tokens"),
    MetricEntry(
        "rollout/engine_load_max",
        "tokens sampled by the busiest engine, relative to the mean of all engines",
        "",
        "near 1",
    ),
    MetricEntry(
        "rollout/kv_capacity_tokens",
        "tokens that the KV cache of an engine holds; the smallest of all engines",
        "tokens",
    ),
    MetricEntry(
        "rollout/kv_usage",
        "highest share of an engine's KV cache that running requests used since the previous rollout, at any batch",
        "0 to 1",
        "below 1",
    ),
    MetricEntry(
        "rollout/running_requests_max",
        "largest number of requests that an engine decoded together since the previous rollout",
        "requests",
    ),
    MetricEntry(
        "rollout/retractions",
        "requests that lost their keys and values since the previous rollout because the KV cache was full, and computed them "
        "again; a pause for a weight push does not count",
        "requests",
        "0",
    ),
    MetricEntry(
        "rollout/dcp_exchange_time",
        "time in which a rank exchanged queries and partial attention with its DCP group since the previous rollout, waiting for the other ranks "
        "included, of the engine with the longest time (docs/dcp.md)",
        "s",
        "below half of perf/rollout_time",
    ),
    MetricEntry(
        "rollout/kv_engines_without_report",
        "engines missing from the metrics of the KV cache, because they restarted or did not respond",
        "engines",
        "0",
    ),
    MetricEntry("rollout/carried_groups", "groups kept for the next rollout", "groups"),
    MetricEntry("rollout/dropped_samples", "samples that did not fill a step and were dropped", "samples"),
    MetricEntry("rollout/dropped_groups/<filter>", "groups a filter dropped", "groups"),
    MetricEntry("rollout/dropped_groups/<filter>/<reason>", "groups that the filter dropped for one reason", "groups"),
    MetricEntry(
        "rollout/generated/raw_reward",
        "mean reward of all generated samples that did not fail, before any filter",
        "",
        "rises",
    ),
    MetricEntry("rollout/generated/accuracy", "share of correct responses of these samples", "0 to 1", "rises"),
    MetricEntry(
        "rollout/generated/zero_std_ratio", "share of all generated groups whose rewards are all equal", "0 to 1"
    ),
    MetricEntry(
        "rollout/empty_in_a_row", "consecutive rollouts without samples to train on, up to this one", "rollouts", "0"
    ),
    MetricEntry(
        "rollout/without_signal_in_a_row",
        "consecutive rollouts in which all rewards that the algorithm compares are equal, up to this one",
        "rollouts",
        "0",
    ),
    MetricEntry(
        "rollout/generated_groups",
        "groups started for a rollout, including those that a filter dropped or over-sampling aborted",
        "groups",
    ),
    MetricEntry(
        "rollout/refills",
        "rounds of additional prompts that replaced dropped groups",
        "",
        "small; if it grows, the prompts have become too easy or are too hard",
    ),
    MetricEntry("rollout/engine_restarts", "engines that died or stalled and were restarted (docs/faults.md)", "", "0"),
    MetricEntry(
        "rollout/remade_groups",
        "groups that moved, with their completed responses, from a lost engine to another one",
        "groups",
        "0",
    ),
    MetricEntry(
        "rollout/overlong_penalty",
        "mean penalty for responses near max_response_len, subtracted from the reward for training only",
        "",
        "near 0; if it grows, raise max_response_len",
    ),
    MetricEntry(
        "rollout/reward/<part>", "mean score of one part of a combined reward (reward.weights), before its weight"
    ),
    MetricEntry("agent/runs", "runs of rollout.agent", ""),
    MetricEntry("agent/calls", "chat completions that agents requested and received", ""),
    MetricEntry(
        "agent/further_samples",
        "samples beyond one per run: additional conversations, and histories that an agent rewrote",
        "samples",
        "0 for an agent with one conversation that only grows",
    ),
    MetricEntry("agent/failures", "runs that raised an error or never called the model", "", "0"),
    MetricEntry("agent/timeouts", "runs that took longer than rollout.agent_deadline_s", "", "0"),
    MetricEntry("reward/calls", "calls of reward functions", ""),
    MetricEntry("reward/timeouts", "calls that took longer than reward.timeout_s", "", "0"),
    MetricEntry("reward/killed", "calls whose process was killed or exceeded reward.memory_gb", "", "0"),
    MetricEntry("reward/remote_failures", "samples that the reward server did not score despite retries", "", "0"),
    MetricEntry("reward/remote_retries", "requests to the reward server that were repeated", "", "near 0"),
    MetricEntry(
        "reward/fallbacks", "samples that got reward.fallback, or were excluded because it is null", "samples", "0"
    ),
    MetricEntry("data/bad_rows", "rows skipped by data.on_bad_row=skip", "rows", "0"),
    MetricEntry("train/loss", "loss, mean over the optimizer steps", ""),
    MetricEntry("train/pg_loss", "policy-gradient part of the loss", ""),
    MetricEntry("train/sft_loss", "negative log-likelihood of the demonstrations", "nats", "falls"),
    MetricEntry(
        "train/pg_clipfrac",
        "share of tokens whose ratio was clipped (gspo: whose sequence's ratio; cispo: whose weight)",
        "0 to 1",
        "below 0.2",
    ),
    MetricEntry(
        "train/pg_clipfrac_lower", "share of tokens at the bound of dual clip, algo.eps_clip_c", "0 to 1", "near 0"
    ),
    MetricEntry("train/ppo_kl", "mean log-ratio of the old to the new policy", "nats", "near 0"),
    MetricEntry("train/ois", "mean ratio of the new to the old policy (gspo: of sequences)", "", "near 1"),
    MetricEntry("train/seq_ratio_max", "largest ratio of a sequence under gspo", "", "near 1"),
    MetricEntry("train/kl_loss", "KL estimate to the reference, in the loss", "nats"),
    MetricEntry("train/entropy_loss", "mean entropy of the policy", "nats", "falls slowly"),
    MetricEntry("train/entropy", "mean entropy of the policy", "nats", "falls slowly"),
    MetricEntry("train/tis", "mean importance weight of old over rollout policy, before truncation", "", "near 1"),
    MetricEntry("train/tis_abs", "mean distance of that weight from 1", "", "near 0"),
    MetricEntry("train/tis_clipfrac", "share of tokens whose weight was truncated", "0 to 1", "below 0.05"),
    MetricEntry("train/mis", "mean importance weight of old over rollout policy, before masking", "", "near 1"),
    MetricEntry("train/mis_abs", "mean distance of that weight from 1", "", "near 0"),
    MetricEntry(
        "train/mis_maskfrac_low",
        "share of tokens masked because the weight is below algo.mis_low",
        "0 to 1",
        "below 0.01",
    ),
    MetricEntry("train/mis_maskfrac_high", "the same, above algo.mis_high", "0 to 1", "below 0.01"),
    MetricEntry(
        "train/rejection_ratio",
        "mean ratio of old to rollout policy of whole sequences: product or geometric mean, as algo.rejection says",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/rejection_frac", "share of the loss weight in sequences that were rejected", "0 to 1", "below 0.05"
    ),
    MetricEntry("train/value_loss", "the critic's loss: half the squared error of its values", "", "falls at first"),
    MetricEntry("train/critic_loss", "the same, weighted by the loss weights", "", "falls at first"),
    MetricEntry(
        "train/value_clipfrac",
        "share of tokens whose value was clipped towards its old estimate",
        "0 to 1",
        "below 0.2",
    ),
    MetricEntry("train/values", "mean value of the critic, after its updates", "", "near train/returns"),
    MetricEntry("train/returns", "mean target of the critic: advantage before whitening plus value", ""),
    MetricEntry(
        "train/explained_variance",
        "share of the returns' variance that the values explain, before the critic's update",
        "up to 1",
        "rises above 0; below 0 the critic is worse than a constant",
    ),
    MetricEntry("train/critic_grad_norm", "global gradient norm of the critic before clipping", ""),
    MetricEntry("train/critic_lr", "learning rate of the critic's last optimizer step", ""),
    MetricEntry(
        "train/teacher_kl",
        "mean log-ratio of student to teacher on sampled tokens: KL(student || teacher)",
        "nats",
        "falls",
    ),
    MetricEntry("train/grad_norm", "global gradient norm before clipping", ""),
    MetricEntry("train/lr", "learning rate of the last optimizer step", ""),
    MetricEntry(
        "train/moe_load",
        "tokens of a layer's busiest expert divided by the mean over its experts, mean over the layers",
        "",
        "near 1; far above 1 the ranks of parallel.ep wait for each other",
    ),
    MetricEntry("train/moe_load_max", "the same, maximum over the layers", ""),
    MetricEntry(
        "train/moe_aux_loss",
        "load balancing loss of the Switch Transformer before model.megatron.moe_aux_loss_coeff, mean over the layers",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/routed_experts_differ",
        "share of tokens for which algo.routing_replay replays other experts than the trainer's router would choose, mean over "
        "the layers",
        "0 to 1",
        "with algo.routing_replay=rollout and no staleness below 0.01 in float32; a few hundredths in bfloat16",
    ),
    MetricEntry("train/routed_experts_differ_max", "the same, maximum over the layers", "0 to 1"),
    MetricEntry(
        "train/routed_experts_gap_max",
        "largest score by which a router prefers its own choice to the replayed one: logits of a softmax, or sigmoids with "
        "their bias",
        "",
    ),
    MetricEntry("train/num_tokens", "tokens trained on", "tokens"),
    MetricEntry(
        "train/off_policy_token_ratio",
        "share of trained tokens sampled by an older version",
        "0 to 1",
        "0 with loop.max_staleness=0",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff",
        "mean |trainer - engine| log-probability of trained tokens, before the first optimizer step; only samples whose tokens"
        " were all sampled by the trainer's current weights",
        "nats",
        "below 1e-5 in float32, below 0.02 in bfloat16; a warning if it grows (weights.drift_warning)",
    ),
    MetricEntry("train/train_rollout_logprob_abs_diff_p99", "99th percentile of the same", "nats"),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_max",
        "largest of the same",
        "nats",
        "below weights.sample_tolerance, or the run ends before the step",
    ),
    MetricEntry(
        "train/train_rollout_kl_k3",
        "k3 estimate of the KL between engine and trainer on those tokens",
        "nats",
        "near 0",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff/<layers>",
        "mean of the same over each rank's first micro-batch, with one kind of the trainer's layers (attention, gdn, mlp, or "
        "all) computed in float64 (weights.probe_layers=true); own_experts: with experts that the trainer chooses "
        "(algo.routing_replay=rollout)",
        "nats",
    ),
    MetricEntry("train/train_rollout_logprob_abs_diff_max/<layers>", "largest of the same", "nats"),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_mixed",
        "mean |trainer - engine| log-probability of tokens sampled by the trainer's weights in samples that other weights "
        "began (partial or asynchronous rollouts); has no tolerance",
        "nats",
        "as train/train_rollout_logprob_abs_diff",
    ),
    MetricEntry("train/train_rollout_logprob_abs_diff_mixed_max", "largest of the same", "nats"),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_stale",
        "mean |trainer - engine| log-probability of tokens sampled by other weights: the off-policy distance; has no tolerance",
        "nats",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_max",
        "largest |trainer - engine| log-probability of the probe sequences after the push",
        "nats",
        "below weights.probe_tolerance, or the run ends",
    ),
    MetricEntry("probe/logprob_abs_diff_mean", "mean of the same", "nats"),
    MetricEntry(
        "probe/decode_logprob_abs_diff_max",
        "largest |trainer - engine| log-probability of tokens that the engine samples after cached prefixes of the probe "
        "sequences",
        "nats",
        "below weights.probe_tolerance, or the run ends",
    ),
    MetricEntry("probe/decode_logprob_abs_diff_mean", "mean of the same", "nats"),
    MetricEntry(
        "probe/prefix_cache_hit_rate",
        "share of these prefixes whose keys and values were in the engine's cache",
        "0 to 1",
        "near 1; less if rollout.sglang turns the prefix cache off or makes its pages large",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_max/<layers>",
        "the same, with one kind of the trainer's layers (attention, gdn, mlp, or all) computed in float64: far smaller if the"
        " trainer's rounding in those layers causes the difference; the rest with `all` is the engine's "
        "(weights.probe_layers=true); own_experts: without algo.routing_replay=rollout",
        "nats",
    ),
    MetricEntry("probe/logprob_abs_diff_mean/<layers>", "mean of the same", "nats"),
    MetricEntry(
        "probe/routed_experts_differ",
        "share of the probe's tokens for which engine and trainer choose different experts, mean over the layers",
        "0 to 1",
        "near 0: only ties that rounding decides",
    ),
    MetricEntry("probe/routed_experts_differ_max", "the same, maximum over the layers", "0 to 1"),
    MetricEntry(
        "probe/routed_experts_gap_max",
        "largest score by which the trainer's router prefers its own choice to the engine's",
        "",
        "below weights.probe_tolerance, or the run ends",
    ),
    MetricEntry(
        "eval/<dataset>",
        "accuracy on held-out prompts (mean score if the reward has no accuracy)",
        "0 to 1",
        "rises",
    ),
    MetricEntry("eval/<dataset>-truncated_ratio", "share of held-out responses cut at the length limit", "0 to 1"),
    MetricEntry(
        "eval/<dataset>-pass@<k>",
        "unbiased estimate, from evaluation.n_samples_per_prompt samples, of the probability that one of k responses to a "
        "held-out prompt is correct (k: powers of two)",
        "0 to 1",
        "rises; pass@1 approaches the others",
    ),
    MetricEntry("eval/<dataset>/response_len/mean", "mean length of held-out responses", "tokens"),
    MetricEntry("eval/<dataset>/response_len/median", "median length of held-out responses", "tokens"),
    MetricEntry("eval/<dataset>/response_len/max", "longest held-out response", "tokens"),
    MetricEntry("eval/<dataset>/response_len/min", "shortest held-out response", "tokens"),
    MetricEntry("comm/<group>/<op>/calls", "collectives issued in a kind of process group, all ranks together", ""),
    MetricEntry("comm/<group>/<op>/bytes", "bytes of these collectives, all ranks together", "bytes"),
    MetricEntry("comm/<group>/<op>/time", "time of a rank's thread for issuing and waiting, maximum of all ranks", "s"),
    MetricEntry("comm/<group>/<op>/checks", "free-memory queries before these collectives", ""),
    MetricEntry("comm/<group>/<op>/check_time", "time of these queries on the slowest rank", "s"),
    MetricEntry("comm/<group>/<op>/clears", "releases of memory before these collectives", "", "0"),
    MetricEntry("comm/<group>/<op>/freed_bytes", "bytes released", "bytes"),
    MetricEntry("guard/checks", "free-memory queries before the collectives of all ranks", ""),
    MetricEntry(
        "guard/time",
        "time of these queries and of releasing memory, maximum of all ranks",
        "s",
        "below 0.1% of perf/step_time",
    ),
    MetricEntry("guard/shortages", "times that free memory was below guard.threshold, or about to be", "", "0"),
    MetricEntry("guard/clears", "releases of memory", "", "0"),
    MetricEntry("guard/freed_bytes", "bytes released", "bytes"),
    MetricEntry("guard/free_bytes", "smallest free memory that any rank measured", "bytes", "above guard.threshold"),
    MetricEntry(
        "guard/reload_time", "destroying and creating communicators, maximum of all ranks (guard.release)", "s"
    ),
    MetricEntry(
        "memory/<phase>",
        "peak memory of the reporting trainer rank in a phase (step, score, push, save) since the previous step: torch's "
        "allocated memory on a GPU, resident memory on a CPU",
        "bytes",
        "flat; growth from step to step is a leak",
    ),
    MetricEntry("perf/dump_time", "scoring and writing the samples of the token table (run.dump_rollouts)", "s"),
    MetricEntry("perf/step_time", "from one step's line to the next, without concurrent work", "s"),
    MetricEntry("perf/rollout_time", "generating and scoring one rollout", "s"),
    MetricEntry("perf/train_wait_time", "the trainer waiting for a rollout", "s", "near 0 when asynchronous"),
    MetricEntry("perf/train_time", "assembling, shipping and training one rollout", "s"),
    MetricEntry("perf/actor_train_time", "the optimizer steps of a rollout on the ranks, without scoring", "s"),
    MetricEntry("perf/log_probs_time", "the pass for old log-probabilities", "s"),
    MetricEntry("perf/ref_log_probs_time", "the pass for reference log-probabilities", "s"),
    MetricEntry("perf/values_time", "the critic's pass for values", "s"),
    MetricEntry("perf/critic_train_time", "training the critic, in parallel with the actor", "s"),
    MetricEntry("perf/teacher_log_probs_time", "the pass for the teacher's log-probabilities", "s"),
    MetricEntry("perf/update_weights_time", "a push, its probe included", "s"),
    MetricEntry("perf/eval_time", "evaluation", "s"),
    MetricEntry("perf/save_time", "delay of training by the checkpoint or export after the previous step", "s"),
    MetricEntry("perf/tokens_per_gpu_per_sec", "sampled tokens per second and engine rank", "tokens/s"),
)


def unknown(names: Iterable[str]) -> list[str]:
    """Return the names that have no entry, sorted."""
    return sorted(name for name in names if not any(entry.matches(name) for entry in ENTRIES))


def render() -> str:
    """Return the table as Markdown."""
    head = [
        "# Metrics",
        "",
        "Generated from `slime_like/metrics/dictionary.py` and `remedies.py` by `scripts/make_metric_docs.py`. A metric has no",
        "healthy range if its values depend on the task.",
        "",
    ]
    rows = ["| name | meaning | unit | healthy | if it is not |", "|---|---|---|---|---|"]
    cells = [[text.replace("|", "\\|") for text in (e.meaning, e.unit, e.healthy, e.remedy)] for e in ENTRIES]
    rows += [f"| `{e.name}` | {' | '.join(texts)} |" for e, texts in zip(ENTRIES, cells, strict=True)]
    return "\n".join([*head, *rows]) + "\n"
