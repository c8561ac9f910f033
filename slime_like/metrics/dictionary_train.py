"""Entries of the metric dictionary for training and for the probe after a weight push."""

from __future__ import annotations

from slime_like.metrics.entry import MetricEntry

ENTRIES = (
    MetricEntry("train/loss", "loss, mean over the optimizer steps", ""),
    MetricEntry("train/pg_loss", "policy-gradient part of the loss", ""),
    MetricEntry("train/sft_loss", "negative log-likelihood of the demonstrations", "nats", "falls"),
    MetricEntry(
        "train/pg_clipfrac",
        "share of tokens whose loss uses a clipped ratio of new to old policy (gspo: the ratio of the sequence; cispo: the weight)",
        "0 to 1",
        "below 0.2",
    ),
    MetricEntry(
        "train/pg_clipfrac_lower", "share of tokens at the bound of dual clip, algo.eps_clip_c", "0 to 1", "near 0"
    ),
    MetricEntry("train/ppo_kl", "mean log-ratio of the old to the new policy", "nats", "near 0"),
    MetricEntry("train/ois", "mean ratio of the new to the old policy (gspo: of sequences)", "", "near 1"),
    MetricEntry("train/seq_ratio_max", "largest ratio of new to old policy of a sequence (gspo)", "", "near 1"),
    MetricEntry(
        "train/kl_loss", "estimate of the KL to the reference, before it is multiplied by algo.kl_loss_coef", "nats"
    ),
    MetricEntry("train/entropy_loss", "as train/entropy; only if algo.entropy_coef is not 0", "nats", "falls slowly"),
    MetricEntry("train/entropy", "mean entropy of the policy", "nats", "falls slowly"),
    MetricEntry(
        "train/tis",
        "mean importance weight, a token's probability under the old policy divided by that under the rollout policy, before "
        "truncation",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/tis_abs",
        "mean distance of the importance weight (train/tis) from 1, before truncation",
        "",
        "near 0",
    ),
    MetricEntry(
        "train/tis_clipfrac",
        "share of tokens whose importance weight was truncated (algo.tis_clip, algo.tis_clip_low)",
        "0 to 1",
        "below 0.05",
    ),
    MetricEntry(
        "train/mis",
        "mean importance weight, a token's probability under the old policy divided by that under the rollout policy, before "
        "masking",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/mis_abs",
        "mean distance of the importance weight (train/mis) from 1, before masking",
        "",
        "near 0",
    ),
    MetricEntry(
        "train/mis_maskfrac_low",
        "share of tokens masked because their importance weight is below algo.mis_low",
        "0 to 1",
        "below 0.01",
    ),
    MetricEntry(
        "train/mis_maskfrac_high",
        "share of tokens masked because their importance weight is above algo.mis_high",
        "0 to 1",
        "below 0.01",
    ),
    MetricEntry(
        "train/rejection_ratio",
        "ratio of a sequence, mean over the tokens; algo.rejection selects the product or the geometric mean of the ratios of its "
        "tokens, each of which is the probability under the old policy divided by that under the rollout policy",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/rejection_frac", "share of the loss weight in sequences that were rejected", "0 to 1", "below 0.05"
    ),
    MetricEntry(
        "train/value_loss",
        "half the squared error of the critic's values, mean over the tokens; critic.value_clip limits the change of a value",
        "",
        "falls at first",
    ),
    MetricEntry(
        "train/critic_loss",
        "loss of the critic's optimizer steps: half the squared errors of its values, summed with the tokens' loss weights",
        "",
        "falls at first",
    ),
    MetricEntry(
        "train/value_clipfrac",
        "share of tokens whose loss uses the value clipped to its old estimate ± critic.value_clip",
        "0 to 1",
        "below 0.2",
    ),
    MetricEntry("train/values", "mean value of the critic in its optimizer steps", "", "near train/returns"),
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
        "mean log-ratio of student to teacher over the trained tokens, an estimate of KL(student || teacher)",
        "nats",
        "falls",
    ),
    MetricEntry("train/grad_norm", "global gradient norm before clipping", ""),
    MetricEntry("train/lr", "learning rate of the last optimizer step", ""),
    MetricEntry(
        "train/moe_load",
        "tokens of a layer's busiest expert divided by the mean over the layer's experts, mean over the layers",
        "",
        "near 1; far above 1 the ranks of parallel.ep wait for each other",
    ),
    MetricEntry(
        "train/moe_load_max",
        "tokens of a layer's busiest expert divided by the mean over the layer's experts, maximum over the layers",
        "",
    ),
    MetricEntry(
        "train/moe_aux_loss",
        "load balancing loss of the Switch Transformer before it is multiplied by model.megatron.moe_aux_loss_coeff, mean over the "
        "layers",
        "",
        "near 1",
    ),
    MetricEntry(
        "train/routed_experts_differ",
        "share of tokens for which algo.routing_replay replays experts that the trainer's router would not choose, mean over "
        "the layers",
        "0 to 1",
        "with algo.routing_replay=rollout and without stale tokens: below 0.01 in float32, a few hundredths in bfloat16",
    ),
    MetricEntry(
        "train/routed_experts_differ_max",
        "share of tokens for which algo.routing_replay replays experts that the trainer's router would not choose, maximum "
        "over the layers",
        "0 to 1",
    ),
    MetricEntry(
        "train/routed_experts_gap_max",
        "largest difference between the score of an expert that the trainer's router would choose and that of the replayed one; "
        "scores are logits of a softmax, or sigmoids plus bias",
        "",
    ),
    MetricEntry("train/num_tokens", "tokens trained on", "tokens"),
    MetricEntry(
        "train/off_policy_token_ratio",
        "share of trained tokens sampled by an older weight version",
        "0 to 1",
        "0 unless rollouts are partial or asynchronous, or groups are carried over (loop.leftover=carry)",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff",
        "mean |trainer - engine| log-probability difference of trained tokens in samples whose tokens were all sampled by the "
        "trainer's current weights; computed before the first optimizer step",
        "nats",
        "below 1e-5 in float32, below 0.02 in bfloat16 (growth causes a warning, see weights.drift_warning)",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_p99",
        "99th percentile of the |trainer - engine| log-probability difference of trained tokens in samples whose tokens were all sampled by "
        "the trainer's current weights",
        "nats",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_max",
        "largest |trainer - engine| log-probability difference of trained tokens in samples whose tokens were all sampled by the "
        "trainer's current weights",
        "nats",
        "below weights.sample_tolerance, which by default is unlimited in bfloat16; above it, the run ends before the step",
    ),
    MetricEntry(
        "train/train_rollout_kl_k3",
        "k3 estimate of the KL between engine and trainer on trained tokens in samples whose tokens were all sampled by the "
        "trainer's current weights",
        "nats",
        "near 0",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff/<layers>",
        "mean |trainer - engine| log-probability difference over each rank's first micro-batch (weights.probe_layers=true); "
        "`<layers>`: the kind of layer that the trainer computes in float64 (attention, gdn, mlp, or all), or own_experts: the "
        "trainer's routers choose the experts instead of replaying the engine's (algo.routing_replay=rollout), and no layer is in "
        "float64",
        "nats",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_max/<layers>",
        "largest |trainer - engine| log-probability difference over each rank's first micro-batch; `<layers>`: as for the mean",
        "nats",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_mixed",
        "mean |trainer - engine| log-probability difference of tokens sampled by the trainer's weights in samples that other "
        "weights began (partial or asynchronous rollouts); it causes a warning if it grows, but never ends the run",
        "nats",
        "as train/train_rollout_logprob_abs_diff",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_mixed_max",
        "largest |trainer - engine| log-probability difference of tokens sampled by the trainer's weights in samples that other "
        "weights began; it never ends the run",
        "nats",
    ),
    MetricEntry(
        "train/train_rollout_logprob_abs_diff_stale",
        "mean |trainer - engine| log-probability difference of tokens sampled by other weights (the off-policy distance); it "
        "never ends the run",
        "nats",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_max",
        "largest |trainer - engine| log-probability difference of the probe sequences after the push",
        "nats",
        "below weights.probe_tolerance; above it, the run ends",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_mean",
        "mean |trainer - engine| log-probability difference of the probe sequences after the push",
        "nats",
    ),
    MetricEntry(
        "probe/decode_logprob_abs_diff_max",
        "largest |trainer - engine| log-probability difference of tokens that the engine samples after cached prefixes of the "
        "probe sequences",
        "nats",
        "below weights.probe_tolerance; above it, the run ends",
    ),
    MetricEntry(
        "probe/decode_logprob_abs_diff_mean",
        "mean |trainer - engine| log-probability difference of tokens that the engine samples after cached prefixes of the "
        "probe sequences",
        "nats",
    ),
    MetricEntry(
        "probe/prefix_cache_hit_rate",
        "share of the prefix tokens of the probe's continuations whose keys and values were in the engine's cache",
        "0 to 1",
        "near 1; less if rollout.sglang turns the prefix cache off or makes its pages large",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_max/<layers>",
        "largest |trainer - engine| log-probability difference of the probe sequences; `<layers>`: as in "
        "train/train_rollout_logprob_abs_diff; far smaller than probe/logprob_abs_diff_max if the trainer's rounding in these "
        "layers causes the difference; the difference that remains with `all` is the engine's rounding",
        "nats",
    ),
    MetricEntry(
        "probe/logprob_abs_diff_mean/<layers>",
        "mean |trainer - engine| log-probability difference of the probe sequences; `<layers>`: as for the maximum",
        "nats",
    ),
    MetricEntry(
        "probe/routed_experts_differ",
        "share of the probe's tokens for which engine and trainer choose different experts, mean over the layers",
        "0 to 1",
        "near 0: only ties that rounding decides",
    ),
    MetricEntry(
        "probe/routed_experts_differ_max",
        "share of the probe's tokens for which engine and trainer choose different experts, maximum over the layers",
        "0 to 1",
    ),
    MetricEntry(
        "probe/routed_experts_gap_max",
        "largest score difference in favour of the experts chosen by the trainer's router over those chosen by the engine's",
        "",
        "below weights.probe_tolerance; above it, the run ends",
    ),
)
