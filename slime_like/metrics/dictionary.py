"""Table of all metrics. ``docs/metrics.md`` is generated from it; an end-to-end test fails on a metric without an entry.

Every entry with a ``healthy`` range has a remedy in ``remedies``.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime_like.metrics import dictionary_rollout, dictionary_train
from slime_like.metrics.entry import MetricEntry

ENTRIES = (
    *dictionary_rollout.ENTRIES,
    *dictionary_train.ENTRIES,
    MetricEntry(
        "eval/<dataset>",
        "accuracy on held-out prompts (mean score if the reward has no accuracy)",
        "0 to 1 (accuracy)",
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
    MetricEntry(
        "comm/<group>/<op>/calls", "calls of one collective in one kind of process group, sum over the ranks", ""
    ),
    MetricEntry(
        "comm/<group>/<op>/bytes", "bytes of one collective in one kind of process group, sum over the ranks", "bytes"
    ),
    MetricEntry(
        "comm/<group>/<op>/time",
        "time in which a rank's thread issued or waited for one collective in one kind of process group, maximum over the ranks",
        "s",
    ),
    MetricEntry(
        "comm/<group>/<op>/checks",
        "free-memory queries before one collective in one kind of process group, sum over the ranks",
        "",
    ),
    MetricEntry(
        "comm/<group>/<op>/check_time",
        "time of the free-memory queries before one collective in one kind of process group, maximum over the ranks",
        "s",
    ),
    MetricEntry(
        "comm/<group>/<op>/clears",
        "releases of memory before one collective in one kind of process group, sum over the ranks",
        "",
        "0",
    ),
    MetricEntry(
        "comm/<group>/<op>/freed_bytes",
        "bytes of memory released before one collective in one kind of process group, sum over the ranks",
        "bytes",
    ),
    MetricEntry("guard/checks", "free-memory queries before collectives, sum over the ranks", ""),
    MetricEntry(
        "guard/time",
        "time of the guard's free-memory queries and of its releases of memory, maximum over the ranks",
        "s",
        "below 0.1% of perf/step_time",
    ),
    MetricEntry(
        "guard/shortages",
        "times that a rank took guard.action because free memory was low, sum over the ranks",
        "",
        "0",
    ),
    MetricEntry("guard/clears", "releases of memory by the guard, sum over the ranks", "", "0"),
    MetricEntry("guard/freed_bytes", "bytes of memory that the guard released, sum over the ranks", "bytes"),
    MetricEntry("guard/free_bytes", "smallest free memory that any rank measured", "bytes", "above guard.threshold"),
    MetricEntry(
        "guard/reload_time",
        "time of destroying and creating communicators, maximum over the ranks (guard.release)",
        "s",
    ),
    MetricEntry(
        "memory/<phase>",
        "peak memory of the reporting trainer rank in a phase (step, score, push, save; with placement.offload_train also "
        "collect) since the previous step: torch's allocated memory on a GPU, resident memory on a CPU",
        "bytes",
        "flat; growth from step to step is a leak",
    ),
    MetricEntry("perf/dump_time", "scoring some samples for the token table of report.html (run.dump_rollouts)", "s"),
    MetricEntry(
        "perf/offload_time",
        "moving memory of trainer and engines between the phases since the previous optimizer step (placement.offload_*)",
        "s",
    ),
    MetricEntry(
        "perf/step_time",
        "from the start of the first to the end of the last phase of the training loop since the previous line of metrics.jsonl; "
        "waiting for a rollout counts, generating one in the background does not",
        "s",
    ),
    MetricEntry("perf/rollout_time", "generating one rollout and computing its rewards", "s"),
    MetricEntry("perf/train_wait_time", "waiting for the next rollout", "s", "near 0 when asynchronous"),
    MetricEntry("perf/train_time", "assembling one rollout, sending it to the ranks and training on it", "s"),
    MetricEntry("perf/actor_train_time", "the optimizer steps of a rollout on the ranks, without scoring passes", "s"),
    MetricEntry("perf/log_probs_time", "the pass for old log-probabilities", "s"),
    MetricEntry("perf/ref_log_probs_time", "the pass for reference log-probabilities", "s"),
    MetricEntry("perf/values_time", "the critic's pass for values", "s"),
    MetricEntry("perf/critic_train_time", "training the critic, in parallel with the actor", "s"),
    MetricEntry("perf/teacher_log_probs_time", "the pass for the teacher's log-probabilities", "s"),
    MetricEntry("perf/update_weights_time", "a weight push and its probe", "s"),
    MetricEntry("perf/eval_time", "evaluation", "s"),
    MetricEntry("perf/save_time", "delay of training by the checkpoint or export after the previous step", "s"),
    MetricEntry(
        "perf/tokens_per_gpu_per_sec",
        "sampled tokens of the groups trained on, divided by perf/rollout_time and the number of engine ranks",
        "tokens/s",
    ),
)


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that have no entry, sorted."""
    return sorted(name for name in names if not any(entry.matches(name) for entry in ENTRIES))


def render() -> str:
    """Return the table as Markdown."""
    head = [
        "# Metrics",
        "",
        "Generated from `slime_like/metrics/dictionary*.py` and `remedies.py` by `scripts/make_metric_docs.py`. The column *healthy* is",
        "empty if the values depend on the task, the model or the machine. The *old policy* is the trainer's before the first optimizer",
        "step on a rollout; the *rollout policy* is that of the engines, which sampled the rollout. With `algo.use_rollout_logprobs`, the",
        "rollout policy takes the place of the old policy in the clipped ratio, and so in `train/ppo_kl` and `train/ois`. Token means of",
        "optimizer steps (such as those of ratios and entropy) are weighted like the loss (`algo.aggregation`) and averaged over the steps",
        "of a rollout. The *probe* compares log-probabilities of engines and trainer after a weight push, for a few sequences",
        "([architecture.md](architecture.md#agreement-of-engine-and-trainer)).",
        "",
    ]
    rows = ["| name | meaning | unit | healthy | if it is not |", "|---|---|---|---|---|"]
    cells = [[text.replace("|", "\\|") for text in (e.meaning, e.unit, e.healthy, e.remedy)] for e in ENTRIES]
    rows += [f"| `{e.name}` | {' | '.join(texts)} |" for e, texts in zip(ENTRIES, cells, strict=True)]
    return "\n".join([*head, *rows]) + "\n"
