"""Attribution of the difference between the trainer's and the engine's log-probabilities to its causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.data.token_table import TokenTable
from slime_like.report.chart import number
from slime_like.report.record import RunRecord

MEAN = "train/train_rollout_logprob_abs_diff"
PROBE = "probe/logprob_abs_diff_mean"
SLOPE_TOLERANCE = 0.02
MIN_TOKENS = 16  # minimum for a slope


@dataclass(frozen=True, slots=True)
class DifferenceCause:
    """Possible cause of the difference between trainer and engine log-probabilities, with its measurement."""

    cause: str
    measurement: str
    source: str  # metric or option that gives the measurement


def attribute(record: RunRecord, tables: Sequence[TokenTable]) -> list[DifferenceCause]:
    """Return the total trainer-engine difference, then its possible causes: staleness, temperature, precision and kernel.

    Each entry has a measurement, or says why there is none or which option enables it.
    """
    return [_overall(record), _staleness(record, tables), _temperature(record, tables), *_rounding(record)]


def by_age(tables: Sequence[TokenTable]) -> dict[int, tuple[float, int]]:
    """Return, by token age in weight versions, (mean |trainer - engine| log-probability difference, number of tokens).

    Tokens that were not sampled, or whose difference is not finite, are left out.
    """
    gaps_by_age: dict[int, list[float]] = {}
    for table in tables:
        gap = np.abs(table.trainer_logprobs - table.rollout_logprobs)
        valid = np.isfinite(gap) & (table.versions >= 0)
        for age in np.unique(table.version - table.versions[valid]):
            gaps_by_age.setdefault(int(age), []).extend(gap[valid & (table.versions == table.version - age)].tolist())
    return {age: (float(np.mean(gaps)), len(gaps)) for age, gaps in sorted(gaps_by_age.items())}


def slope(tables: Sequence[TokenTable]) -> tuple[float, int] | None:
    """Return the least-squares slope of trainer on engine log-probabilities, and the number of tokens.

    A token is used if it was sampled with the weight version that the trainer had, and both log-probabilities are finite. The
    slope is about 1 if engine and trainer use the same temperature. The result is None if there are fewer than
    ``MIN_TOKENS`` tokens, or if the engine's log-probabilities are all equal.
    """
    pairs = [
        (table.rollout_logprobs[valid], table.trainer_logprobs[valid])
        for table in tables
        for valid in [(table.versions == table.version) & np.isfinite(table.rollout_logprobs + table.trainer_logprobs)]
    ]
    x = np.concatenate([pair[0] for pair in pairs]).astype(np.float64) if pairs else np.zeros(0)
    y = np.concatenate([pair[1] for pair in pairs]).astype(np.float64) if pairs else np.zeros(0)
    variance = float(np.var(x)) if len(x) >= MIN_TOKENS else 0.0
    if variance < 1e-12:
        return None
    return float(np.mean((x - x.mean()) * (y - y.mean())) / variance), len(x)


def _last(record: RunRecord, metric: str) -> float | None:
    """Return the last value of ``metric``; None if no step has one."""
    curve = record.curve(metric)
    return curve[-1][1] if curve else None


def _overall(record: RunRecord) -> DifferenceCause:
    values = [_last(record, f"{MEAN}{suffix}") for suffix in ("", "_p99", "_max")]
    if values[0] is None:
        return DifferenceCause("all causes", "not measured", "no step trained on samples of the trainer's own version")
    text = ", ".join(
        f"{name} {number(v)}" for name, v in zip(("mean", "p99", "max"), values, strict=True) if v is not None
    )
    return DifferenceCause(
        "all causes", f"{text} nats", f"{MEAN} at the last step, of samples of the trainer's own version"
    )


def _staleness(record: RunRecord, tables: Sequence[TokenTable]) -> DifferenceCause:
    metric = "train/off_policy_token_ratio"
    share, ages = _last(record, metric), by_age(tables)
    has_old_tokens = any(age > 0 for age in ages)
    if not share and not has_old_tokens:
        text = "none: every token of the last step was sampled by the version that trained on it"
        if share is None:
            return DifferenceCause("staleness", "not measured", f"no step has {metric}: none trained on sampled tokens")
        return DifferenceCause("staleness", text, metric)
    text = f"{'an unknown share' if share is None else f'{share:.1%}'} of the last step's tokens are of older versions"
    if has_old_tokens:
        listing = ", ".join(f"age {age}: {number(mean)} ({count} tokens)" for age, (mean, count) in ages.items())
        return DifferenceCause(
            "staleness", f"{text}; mean |difference| by age in versions: {listing}", "the dumped samples"
        )
    return DifferenceCause("staleness", text, "run.dump_rollouts=true shows the difference by age")


def _temperature(record: RunRecord, tables: Sequence[TokenTable]) -> DifferenceCause:
    temperature = record.setting("rollout.temperature")
    setting = f"both compute at rollout.temperature={'?' if temperature is None else temperature}"
    fit = slope(tables)
    if fit is None:
        return DifferenceCause("temperature", setting, "run.dump_rollouts=true compares it on samples")
    verdict = "no difference" if abs(fit[0] - 1) < SLOPE_TOLERANCE else "one side computes another distribution"
    return DifferenceCause(
        "temperature",
        f"{setting}; slope of trainer on engine {fit[0]:.5f}: {verdict}",
        f"{fit[1]} dumped tokens of the trainer's own version; 1 is the same temperature",
    )


def _rounding(record: RunRecord) -> Iterator[DifferenceCause]:
    total, exact = _last(record, PROBE), _last(record, f"{PROBE}/all")
    if total is None:
        yield DifferenceCause(
            "precision, kernel",
            "not measured",
            "weights.probe_sequences=0 turned the probe off, or the run pushed no weights",
        )
        return
    if exact is None:
        text = f"together {number(total)} nats after the last push, where versions and temperature are equal"
        yield DifferenceCause("precision, kernel", text, f"{PROBE}; weights.probe_layers=true separates them")
        return
    kinds = [
        name.rpartition("/")[2] for name in record.metrics if name.startswith(f"{PROBE}/") and not name.endswith("/all")
    ]
    per_kind = ", ".join(f"{number(_last(record, f'{PROBE}/{kind}') or 0.0)} with exact {kind}" for kind in kinds)
    yield DifferenceCause(
        "precision",
        f"the trainer's rounding causes {number(max(0.0, total - exact))} of {number(total)} nats"
        + (f" ({per_kind})" if per_kind else ""),
        f"{PROBE} minus the difference with the trainer's layers in float64",
    )
    yield DifferenceCause("kernel", f"the engine's arithmetic causes {number(exact)} nats", f"{PROBE}/all")
