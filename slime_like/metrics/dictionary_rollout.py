"""Entries of the metric dictionary for rollouts: samples, agents, rewards and data."""

from __future__ import annotations

from slime_like.metrics.entry import MetricEntry

ENTRIES = (
    MetricEntry("rollout/raw_reward", "mean reward of the samples trained on, after filters", "", "rises"),
    MetricEntry(
        "rollout/accuracy", "share of correct responses among the samples trained on, after filters", "0 to 1", "rises"
    ),
    MetricEntry(
        "rollout/num_samples",
        "samples of the groups trained on",
        "",
        "rollout.batch_size * rollout.n_samples_per_prompt unless filters drop groups",
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
        "share of responses cut at rollout.max_response_len or the context length",
        "0 to 1",
        "small",
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
        "at most loop.max_staleness, 1 more with loop.leftover=carry; with partial rollouts at most "
        "rollout.max_partial_staleness (loop.max_staleness + 4 by default)",
    ),
    MetricEntry(
        "rollout/staleness_mean",
        "trainer version minus the version of a group's oldest token, mean over groups",
        "versions",
    ),
    MetricEntry(
        "rollout/mixed_version_ratio",
        "share of samples whose tokens were sampled under several weight versions",
        "0 to 1",
        "0 unless rollouts are partial or asynchronous",
    ),
    MetricEntry(
        "rollout/stopped_groups",
        "groups that over-sampling interrupted because the rollout was full; without partial rollouts they are aborted",
        "groups",
        "about rollout.over_sampling_batch_size minus rollout.batch_size",
    ),
    MetricEntry(
        "rollout/restarted_groups",
        "interrupted groups that were too old to be continued; their prompts are sampled again",
        "groups",
        "0",
    ),
    MetricEntry(
        "rollout/wasted_tokens",
        "tokens sampled for groups that over-sampling then aborted or restarted",
        "tokens",
        "0 with partial rollouts",
    ),
    MetricEntry(
        "rollout/prefix_cache_hit_rate",
        "share of prompt tokens whose keys and values were in the engine's prefix cache; the prompt of a continued response "
        "includes the tokens sampled before",
        "0 to 1",
    ),
    MetricEntry(
        "rollout/avg_cached_tokens_per_sample",
        "prompt tokens that a request reads from the prefix cache, mean over requests",
        "tokens",
    ),
    MetricEntry(
        "rollout/engine_load_max",
        "tokens sampled by the busiest engine, relative to the mean of all engines of its rollout manager",
        "",
        "near 1",
    ),
    MetricEntry(
        "rollout/kv_capacity_tokens",
        "capacity of an engine's KV cache in tokens; minimum over the engines",
        "tokens",
    ),
    MetricEntry(
        "rollout/kv_usage",
        "peak share of an engine's KV cache that running requests used since the previous rollout, maximum over the engines",
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
        "time since the previous rollout in which a rank exchanged queries and partial attention with its DCP group, including "
        "waits for other ranks; maximum over the engines (docs/dcp.md)",
        "s",
        "below half of perf/rollout_time",
    ),
    MetricEntry(
        "rollout/kv_engines_without_report",
        "engines missing from the metrics of the KV cache, because they served no requests or did not respond",
        "engines",
        "0",
    ),
    MetricEntry("rollout/carried_groups", "groups kept for the next rollout (loop.leftover=carry)", "groups"),
    MetricEntry(
        "rollout/dropped_samples",
        "samples dropped because the rollout already had enough (loop.leftover=drop)",
        "samples",
    ),
    MetricEntry(
        "rollout/dropped_groups/<filter>",
        "groups that one filter dropped; filter `stale`: carried groups that became too old",
        "groups",
    ),
    MetricEntry("rollout/dropped_groups/<filter>/<reason>", "groups that one filter dropped for one reason", "groups"),
    MetricEntry(
        "rollout/generated/raw_reward",
        "mean reward of all generated samples that did not fail, before any filter",
        "",
        "rises",
    ),
    MetricEntry(
        "rollout/generated/accuracy",
        "share of correct responses among all generated samples that did not fail, before any filter",
        "0 to 1",
        "rises",
    ),
    MetricEntry(
        "rollout/generated/zero_std_ratio", "share of all generated groups whose rewards are all equal", "0 to 1"
    ),
    MetricEntry(
        "rollout/empty_in_a_row", "consecutive rollouts, up to this one, without samples to train on", "rollouts", "0"
    ),
    MetricEntry(
        "rollout/without_signal_in_a_row",
        "consecutive rollouts, up to this one, in which all rewards that the algorithm compares are equal",
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
        "small",
    ),
    MetricEntry("rollout/engine_restarts", "engines that died or stalled and were restarted (docs/faults.md)", "", "0"),
    MetricEntry(
        "rollout/remade_groups",
        "groups that moved, with their completed responses, from a lost engine to another",
        "groups",
        "0",
    ),
    MetricEntry(
        "rollout/overlong_penalty",
        "mean penalty for responses near rollout.max_response_len; only advantages include it, reported rewards do not",
        "",
        "near 0",
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
    MetricEntry(
        "agent/failures",
        "runs that raised an error or never called the model, except if the last call was refused for its length, or was aborted",
        "",
        "0",
    ),
    MetricEntry("agent/timeouts", "runs that took longer than rollout.agent_deadline_s", "", "0"),
    MetricEntry("reward/calls", "calls of reward functions, and samples sent to the reward server", ""),
    MetricEntry("reward/timeouts", "calls that took longer than reward.timeout_s", "", "0"),
    MetricEntry("reward/killed", "calls whose process was killed or exceeded reward.memory_gb", "", "0"),
    MetricEntry(
        "reward/remote_failures", "samples that the reward server did not score despite retries", "samples", "0"
    ),
    MetricEntry("reward/remote_retries", "requests to the reward server that were repeated", "", "near 0"),
    MetricEntry(
        "reward/fallbacks", "samples that got reward.fallback, or were excluded because it is null", "samples", "0"
    ),
    MetricEntry("data/bad_rows", "rows skipped by data.on_bad_row=skip", "rows", "0"),
)
