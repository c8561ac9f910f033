"""Attribution of the difference between the trainer's and the engine's log-probabilities to its causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from slime_like.data.token_view import TokenTable
from slime_like.report.chart import number
from slime_like.report.record import RunRecord

MEAN = "train/train_rollout_logprob_abs_diff"
PROBE = "probe/logprob_abs_diff_mean"
SLOPE_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class DifferenceCause:
    """A possible cause with its measurement and the source of the measurement."""

    cause: str
    measured: str
    source: str


def attribute(record: RunRecord, views: Sequence[TokenTable]) -> list[DifferenceCause]:
    """Return staleness, temperature, precision and kernel, each with its measurement or the option that would measure it."""
    return [_overall(record), _staleness(record, views), _temperature(record, views), *_rounding(record)]


def by_age(views: Sequence[TokenTable]) -> dict[int, tuple[float, int]]:
    """Return age of sampled tokens in versions -> (mean |trainer - engine|, number of tokens)."""
    gaps_by_age: dict[int, list[float]] = {}
    for view in views:
        gap = np.abs(view.trainer_logprobs - view.rollout_logprobs)
        valid = np.isfinite(gap) & (view.versions >= 0)
        for age in np.unique(view.version - view.versions[valid]):
            gaps_by_age.setdefault(int(age), []).extend(gap[valid & (view.versions == view.version - age)].tolist())
    return {age: (float(np.mean(gaps)), len(gaps)) for age, gaps in sorted(gaps_by_age.items())}


def slope(views: Sequence[TokenTable]) -> tuple[float, int] | None:
    """Return the least-squares slope of trainer on engine log-probabilities, for tokens of the trainer's version.

    At equal temperatures the slope is 1; a different temperature on one side changes it. None with too few tokens.
    """
    pairs = [
        (view.rollout_logprobs[valid], view.trainer_logprobs[valid])
        for view in views
        for valid in [(view.versions == view.version) & np.isfinite(view.rollout_logprobs + view.trainer_logprobs)]
    ]
    x = np.concatenate([pair[0] for pair in pairs]).astype(np.float64) if pairs else np.zeros(0)
    y = np.concatenate([pair[1] for pair in pairs]).astype(np.float64) if pairs else np.zeros(0)
    spread = float(np.var(x)) if len(x) >= 16 else 0.0
    if spread < 1e-12:
        return None
    return float(np.mean((x - x.mean()) * (y - y.mean())) / spread), len(x)


def _last(record: RunRecord, metric: str) -> float | None:
    curve = record.curve(metric)
    return curve[-1][1] if curve else None


def _overall(record: RunRecord) -> DifferenceCause:
    values = [_last(record, f"{MEAN}{suffix}") for suffix in ("", "_p99", "_max")]
    if values[0] is None:
        return DifferenceCause("all of it", "not measured", "no step trained on samples of the trainer's own version")
    text = ", ".join(
        f"{name} {number(v)}" for name, v in zip(("mean", "p99", "max"), values, strict=True) if v is not None
    )
    return DifferenceCause(
        "all of it", f"{text} nats", f"{MEAN} at the last step, of samples of the trainer's own version"
    )


def _staleness(record: RunRecord, views: Sequence[TokenTable]) -> DifferenceCause:
    share = _last(record, "train/off_policy_token_ratio") or 0.0
    ages = by_age(views)
    old = {age: gap for age, gap in ages.items() if age > 0}
    if not share and not old:
        return DifferenceCause(
            "staleness",
            "none: every token was sampled by the version that trained on it",
            "train/off_policy_token_ratio",
        )
    text = f"{share:.1%} of the last step's tokens are of older versions"
    if old:
        listing = ", ".join(f"{age} old: {number(mean)} ({count} tokens)" for age, (mean, count) in ages.items())
        return DifferenceCause(
            "staleness", f"{text}; mean |difference| by age in versions: {listing}", "the dumped samples"
        )
    return DifferenceCause("staleness", text, "run.dump_rollouts=true shows the difference by age")


def _temperature(record: RunRecord, views: Sequence[TokenTable]) -> DifferenceCause:
    rollout = cast("Mapping[str, Any]", record.config.get("rollout") or {})
    setting = f"both compute at rollout.temperature={rollout.get('temperature', '?')}"
    fit = slope(views)
    if fit is None:
        return DifferenceCause("temperature", setting, "run.dump_rollouts=true checks it by samples")
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
            "precision, kernel", "not measured", "weights.probe_sequences=0 turned the probe off, or nothing was pushed"
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
        f"of {number(total)} nats the trainer's rounding makes {number(max(0.0, total - exact))}"
        + (f" ({per_kind})" if per_kind else ""),
        f"{PROBE} minus the difference with the trainer's layers in float64",
    )
    yield DifferenceCause("kernel", f"{number(exact)} nats are the engine's own arithmetic", f"{PROBE}/all")
