"""Apply ``rollout.filters`` to finished groups; report counts of dropped groups and means over all finished groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from slime_like.config.schema import names
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import UserCodeError
from slime_like.interfaces import GroupFilter
from slime_like.metrics.types import Mean, Metric, Sum
from slime_like.registry import metric_part, resolve
from slime_like.types import SampleGroup
from slime_like.util.user_code import name_user_errors

KEY = "rollout.filters"
MAX_REASONS = 20  # metrics per filter; further reasons are counted together
OTHER = "other"


@dataclass(slots=True)
class _GroupStats:
    """Statistics of a rollout's groups before filtering."""

    scores: list[float] = field(default_factory=list[float])
    accuracies: list[float] = field(default_factory=list[float])
    spreads: list[bool] = field(default_factory=list[bool])  # True if a group's rewards differ
    num_groups: int = 0
    first: SampleGroup | None = None

    def add(self, group: SampleGroup) -> None:
        self.num_groups, self.first = self.num_groups + 1, self.first or group
        rewards = [reward for sample in group.samples if (reward := sample.trained_reward) is not None]
        self.scores += [reward.score for reward in rewards]
        self.accuracies += [reward.accuracy for reward in rewards if reward.accuracy is not None]
        if rewards:
            self.spreads.append(len(group.trained_scores) > 1)

    def metrics(self) -> list[Metric]:
        """Return the metrics ``rollout/generated/*``, which are means. A mean of no values is omitted."""
        columns = {
            "raw_reward": self.scores,
            "accuracy": self.accuracies,
            "zero_std_ratio": [not differs for differs in self.spreads],
        }
        return [
            Mean(f"rollout/generated/{name}", float(np.mean(values)), weight=len(values))
            for name, values in columns.items()
            if values
        ]


@dataclass(frozen=True, slots=True)
class FilterReport:
    """Report on the groups to which a rollout's filters were applied: metrics, counts as text, and the first group."""

    metrics: tuple[Metric, ...] = ()
    summary: str = "its groups were generated before the run was resumed"
    example: SampleGroup | None = None


class GroupFilters:
    """Filters of a run, in order."""

    def __init__(self, cfg: RolloutConfig) -> None:
        self._rules: list[tuple[str, GroupFilter]] = [(name, resolve(KEY, name, names.FILTERS)) for name in cfg.filters]
        # Number of groups dropped since the last report, by filter and reason.
        self._dropped: dict[str, Counter[str]] = defaultdict(Counter)
        self._stats = _GroupStats()

    def keep(self, group: SampleGroup) -> bool:
        """Count the group, and return whether it passes every filter.

        Raises ``UserCodeError`` if a filter raises, or returns something other than None or a reason.
        """
        self._stats.add(group)
        for name, rule in self._rules:
            subject = f"the group of prompt {group.prompt.prompt_id} ({group.prompt.dataset})"
            with name_user_errors(KEY, name, subject):
                reason = cast(object, rule(group))  # user code may return anything
            if reason is None:
                continue
            if not isinstance(reason, str) or not reason:
                raise UserCodeError(
                    f"{KEY}={name} returned {reason!r:.80} ({type(reason).__name__}) for {subject}: a filter returns None to "
                    "keep a group, or a word that names the reason for dropping it"
                )
            self._count(name, reason)
            return False
        return True

    def report(self) -> FilterReport:
        """Return a report on the groups since the last call, with counts of dropped groups and means over all groups.

        A reason that has been reported once is always reported from then on, even as 0, so that its curve has no gaps.
        """
        summary, metrics = self._summary(), list[Metric]()
        for name, _ in self._rules:
            reasons = self._dropped[name]
            prefix = f"rollout/dropped_groups/{metric_part(name)}"
            metrics.append(Sum(prefix, sum(reasons.values())))
            metrics += [Sum(f"{prefix}/{reason}", count) for reason, count in reasons.items()]
            self._dropped[name] = Counter(dict.fromkeys(reasons, 0))
        stats, self._stats = self._stats, _GroupStats()
        return FilterReport((*metrics, *stats.metrics()), summary, stats.first)

    def _summary(self) -> str:
        dropped_counts = {name: {r: n for r, n in reasons.items() if n} for name, reasons in self._dropped.items()}
        causes = [f"{name} dropped {sum(r.values())} ({', '.join(r)})" for name, r in dropped_counts.items() if r]
        return f"{self._stats.num_groups} groups were generated{''.join(f', {cause}' for cause in causes)}"

    def _count(self, name: str, reason: str) -> None:
        reasons = self._dropped[name]
        label = reason if reason.isprintable() and "/" not in reason and len(reason) <= 60 else OTHER
        reasons[label if label in reasons or len(reasons) < MAX_REASONS else OTHER] += 1
