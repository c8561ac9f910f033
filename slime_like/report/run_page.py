"""Page of a run: curves, difference between trainer and engine, time and memory, sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from slime_like.data import faults
from slime_like.metrics import dictionary
from slime_like.report.attribution import attribute
from slime_like.report.chart import Series, chart, number
from slime_like.report.collectives import collectives
from slime_like.report.page import html, page, table
from slime_like.report.record import LogRow, RunRecord, flat
from slime_like.report.samples import SampledRollout
from slime_like.report.token_page import Decode, group_html, legend
from slime_like.util.counted import counted

ENTROPY = "entropy"
CHARTS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Reward": (
        ("reward", ("rollout/raw_reward", "rollout/accuracy")),
        ("groups with equal rewards", ("rollout/zero_std_ratio",)),
    ),
    "KL and entropy": (
        ("KL to the reference", ("train/kl_loss",)),
        ("KL of old and new policy", ("train/ppo_kl",)),
        ("KL to the teacher", ("train/teacher_kl",)),
        (ENTROPY, ("train/entropy", "train/entropy_loss")),
        ("log-probability of sampled tokens", ("rollout/log_probs",)),
    ),
    "Lengths": (
        ("response length", tuple(f"rollout/response_len/{name}" for name in ("mean", "median", "min", "max"))),
        ("cut or aborted", ("rollout/truncated_ratio", "rollout/aborted_ratio")),
    ),
    "Optimisation": (
        ("loss", ("train/loss", "train/pg_loss")),
        ("gradient norm", ("train/grad_norm", "train/critic_grad_norm")),
        ("learning rate", ("train/lr", "train/critic_lr")),
        ("clipped tokens", ("train/pg_clipfrac", "train/tis_clipfrac")),
        ("critic", ("train/value_loss", "train/critic_loss")),
        ("explained variance", ("train/explained_variance",)),
    ),
    "Trainer and engine": (
        ("|trainer - engine|, mean", ("train/train_rollout_logprob_abs_diff",)),
        ("|trainer - engine|, largest", tuple(f"train/train_rollout_logprob_abs_diff_{n}" for n in ("p99", "max"))),
        ("KL of engine and trainer", ("train/train_rollout_kl_k3",)),
        ("after each push", ("probe/logprob_abs_diff_max", "probe/logprob_abs_diff_mean")),
        ("tokens of older versions", ("train/off_policy_token_ratio",)),
        ("staleness", ("rollout/staleness_max", "rollout/staleness_mean")),
    ),
}
PHASES = ("train_wait", "train", "update_weights", "eval", "save")  # consecutive phases of the loop
NESTED_PHASES = (
    "rollout",
    "actor_train",
    "log_probs",
    "ref_log_probs",
    "values",
    "critic_train",
    "teacher_log_probs",
    "dump",
)
MEMORY = "memory/"
MAX_WARNINGS = 50
GIB = 2**30


def run_page(record: RunRecord, sampled: Sequence[SampledRollout], decode: Decode) -> str:
    """Return the page of a run; ``sampled`` are the rollouts whose tokens are shown.

    Raises ``DataError`` if the faults.jsonl in the run's folder cannot be read.
    """
    return page(record.name, _body(record, sampled, decode))


def _body(record: RunRecord, sampled: Sequence[SampledRollout], decode: Decode) -> Iterator[str]:
    yield from _head(record)
    for title, charts in CHARTS.items():
        if title == "Trainer and engine":
            yield from _evaluation(record)
        rendered = [_chart(record, name, metrics) for name, metrics in charts]
        if figures := [text for text in rendered if text]:
            yield f'<h2>{title}</h2><div class="grid-of-charts">{"".join(figures)}</div>'
    tables = [rollout.token_table for rollout in sampled if rollout.token_table is not None]
    causes = attribute(record, tables)
    yield "<h3>Causes of the difference</h3>"
    yield table(("cause", "measured", "by"), ((cause.cause, cause.measurement, cause.source) for cause in causes))
    yield from _time(record)
    yield from _memory(record)
    yield from collectives(record)
    yield from _faults(record)
    yield from _samples(sampled, decode)
    yield from _metrics(record)
    yield "<h2>Configuration</h2><details><summary>every key</summary>"
    yield table(("key", "value"), ((key, repr(value)) for key, value in flat(record.config).items()))
    yield "</details>"


def _head(record: RunRecord) -> Iterator[str]:
    rows, config = record.rows, flat(record.config)
    last = rows[-1].step
    seconds = rows[-1].time - rows[0].time
    duration = f", {seconds:.0f} s from its first line to its last" if len(rows) > 1 and math.isfinite(seconds) else ""
    num_planned = config.get("loop.num_rollout")
    total = f"{last} of {html(str(num_planned))} rollouts" if num_planned is not None else counted(last, "rollout")
    trained = sum(row.values.get("train/num_tokens", 0.0) > 0 for row in rows)
    trained_text = "" if config.get("run.mode") == "rollout_only" else f", {trained} of them trained on"
    yield f"<h1>{html(record.name)}</h1>"
    yield f"<p class=dim>{html(str(record.folder))}; {total}{trained_text}{duration}</p>"
    facts = [
        f"{key}={config[key]}"
        for key in (
            "algo.name",
            "model.hf_checkpoint",
            "data.train",
            "reward.name",
            "placement.mode",
            "loop.max_staleness",
        )
        if key in config
    ]
    yield f"<p><code>{html(' '.join(facts))}</code></p>"
    yield from (f"<p class=bad>{html(note)}</p>" for note in record.notes)
    yield from _warnings(record)


def _warnings(record: RunRecord) -> Iterator[str]:
    """Yield a table of the last ``MAX_WARNINGS`` warnings, those of the last step first; nothing if there are none."""
    warnings = [(row.step, warning) for row in record.rows for warning in row.warnings]
    if warnings:
        limit_text = f", the last {MAX_WARNINGS}" if len(warnings) > MAX_WARNINGS else ""
        yield f"<h2>Warnings</h2><details open><summary>{counted(len(warnings), 'warning')} of the run{limit_text}</summary>"
        shown_warnings = sorted(warnings[-MAX_WARNINGS:], key=lambda entry: -entry[0])
        yield table(("step", "warning"), shown_warnings)
        yield "</details>"


def _unit(metric: str) -> str:
    return next((entry.unit for entry in dictionary.ENTRIES if entry.matches(metric)), "")


def _chart(record: RunRecord, title: str, metrics: Sequence[str]) -> str:
    if title == ENTROPY and not any(record.curve(name) for name in metrics):
        return _estimated_entropy(record)
    lines = [
        Series(name.partition("/")[2], record.curve(name), colour)
        for colour, name in enumerate(metrics)
        if record.curve(name)
    ]
    return chart(title, lines, unit=_unit(metrics[0])) if lines else ""


def _estimated_entropy(record: RunRecord) -> str:
    """Return a chart of the mean -log p of sampled tokens, an estimate of the entropy; empty if it was not recorded."""
    curve = [(step, -value) for step, value in record.curve("rollout/log_probs")]
    note = "estimated as minus the mean log-probability of sampled tokens"
    return chart(ENTROPY, [Series("entropy", curve)], unit="nats", note=note) if curve else ""


def _evaluation(record: RunRecord) -> Iterator[str]:
    names = [name for name in record.metrics if name.startswith("eval/")]
    by_set: dict[str, list[str]] = {}  # name of a set's score -> names of the set's metrics
    for name in sorted(names, key=len):  # a score before the longer names that begin with it
        score = next((score for score in by_set if name.startswith((f"{score}-", f"{score}/"))), name)
        by_set.setdefault(score, []).append(name)
    if by_set:
        yield '<h2>Evaluation</h2><div class="grid-of-charts">'
        for score in (name for name in names if name in by_set):
            ordered_names = (name for name in names if name in by_set[score])
            yield from (_chart(record, name.removeprefix("eval/"), (name,)) for name in ordered_names)
        yield "</div>"


def _seconds(row: LogRow, phase: str) -> float:
    return row.values.get(f"perf/{phase}_time", 0.0)


def _time(record: RunRecord) -> Iterator[str]:
    rows = [row for row in record.rows if row.step > 0] or list(record.rows)
    totals = {phase: sum(_seconds(row, phase) for row in rows) for phase in PHASES}
    total = sum(totals.values())
    yield "<h2>Time</h2>"
    if not total > 0:
        yield "<p class=note>the run recorded no times</p>"
        return
    yield _bar(totals, total)
    nested = {phase: sum(_seconds(row, phase) for row in rows) for phase in NESTED_PHASES}
    cells = [(phase, "phase of the loop", phase_s, phase_s / total) for phase, phase_s in totals.items() if phase_s]
    cells += [(phase, "concurrent or nested", phase_s, phase_s / total) for phase, phase_s in nested.items() if phase_s]
    yield table(
        ("", "", "s", "s per step", "share of the loop"),
        (
            (name, kind, f"{phase_s:.1f}", f"{phase_s / len(rows):.3f}", f"{share:.1%}")
            for name, kind, phase_s, share in cells
        ),
        numbers=(2, 3, 4),
    )
    lines = [
        Series(phase, record.curve(f"perf/{phase}_time"), colour)
        for colour, phase in enumerate(PHASES)
        if totals[phase]
    ]
    rate_title = "sampled tokens of the groups trained on, per second and engine rank"
    rate = _chart(record, rate_title, ("perf/tokens_per_gpu_per_sec",))
    yield f'<div class="grid-of-charts">{chart("time of each phase", lines, unit="s")}{rate}</div>'


def _bar(totals: Mapping[str, float], total: float) -> str:
    pieces: list[str] = []
    x = 0.0
    for colour, (phase, phase_s) in enumerate(totals.items()):
        width = 1000 * phase_s / total
        title = html(f"{phase}: {phase_s / total:.1%}")
        pieces.append(
            f'<rect class="c{colour}" x="{x:.1f}" y="0" width="{width:.1f}" height="22"><title>{title}</title></rect>'
        )
        x += width
    keys = "".join(
        f'<span class="key c{colour}">{html(p)} {s / total:.0%}</span>'
        for colour, (p, s) in enumerate(totals.items())
        if s
    )
    bar = f'<svg viewBox="0 0 1000 22" role="img" aria-label="share of time of each phase">{"".join(pieces)}</svg>'
    return f"<figure>{bar}<p class=legend>{keys}</p></figure>"


def _memory(record: RunRecord) -> Iterator[str]:
    names = [name for name in record.metrics if name.startswith(MEMORY)]
    yield "<h2>Memory</h2>"
    if not names and not record.curve("guard/free_bytes"):
        yield "<p class=note>the run recorded no memory metrics</p>"
        return
    lines = [
        Series(name.removeprefix(MEMORY), [(step, value / GIB) for step, value in record.curve(name)], colour)
        for colour, name in enumerate(names)
    ]
    free = [(step, value / GIB) for step, value in record.curve("guard/free_bytes")]
    yield f'<div class="grid-of-charts">{chart("peak of the reporting trainer rank by phase", lines, unit="GiB") if lines else ""}'
    yield f"{chart('smallest free memory that the guard measured', [Series('free', free)], unit='GiB') if free else ''}</div>"
    peaks = ((line.name, f"{max(y for _, y in line.points):.3f}", f"{line.points[-1][1]:.3f}") for line in lines)
    if lines:
        yield table(("phase", "highest peak, GiB", "last peak, GiB"), peaks, numbers=(1, 2))


def _faults(record: RunRecord) -> Iterator[str]:
    """Yield the table of faults, if there were any."""
    if outcomes := faults.outcomes(*faults.read(record.folder)):
        yield "<h2>Faults</h2>"
        yield table(("fault", "target", "result"), ((o.fault, o.target, o.result) for o in outcomes))


def _samples(sampled: Sequence[SampledRollout], decode: Decode) -> Iterator[str]:
    yield "<h2>Sampled tokens</h2>"
    if not sampled:
        yield "<p class=note>run.dump_rollouts=true saves the samples of each rollout, which are then shown here</p>"
        return
    yield legend()
    for rollout in sampled:
        version = (
            "" if rollout.token_table is None else f", scored by the trainer's version {rollout.token_table.version}"
        )
        yield f"<h3>Rollout {rollout.rollout_id}{version}</h3>"
        for group in rollout.groups:
            yield from group_html(group, rollout.token_table, decode, rollout.rollout_id)


def _metrics(record: RunRecord) -> Iterator[str]:
    yield "<h2>All metrics</h2><details><summary>first, last, smallest and largest value, and the healthy range</summary>"
    rows: list[tuple[object, ...]] = []
    for name in record.metrics:
        values = [value for _, value in record.curve(name)]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        entry = next((entry for entry in dictionary.ENTRIES if entry.matches(name)), dictionary.MetricEntry(name, ""))
        figures = map(number, (values[0], values[-1], min(finite), max(finite)))
        rows.append((name, *figures, entry.unit, entry.meaning, entry.healthy, entry.remedy))
    columns = ("metric", "first", "last", "smallest", "largest", "unit", "meaning", "healthy", "if it is not")
    yield table(columns, rows, numbers=(1, 2, 3, 4))
    yield "</details>"


def tokenizer_folder(record: RunRecord) -> str | None:
    """Return the folder of the run's tokenizer; None if its configuration names none."""
    folder = record.setting("model.hf_checkpoint")
    return folder if isinstance(folder, str) else None
