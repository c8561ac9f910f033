"""Warnings about rollouts without learning signal: no group left to train on, or rewards that do not differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.data.overlong import OverlongPenalty
from slime_like.metrics.types import Last, Metric, RunWarning
from slime_like.types import Sample, SampleGroup

FIRST_EMPTY, FIRST_FLAT = 1, 3  # consecutive rollouts before the first warning
REPEATS = (10, 30, 100, 300, 1000, 3000, 10000)  # lengths of a streak at which the warning is repeated
MAX_TEXT = 400  # characters of a quoted sample


@dataclass(slots=True)
class LearningSignal:
    """Counter of consecutive rollouts that have no groups, or in which rewards do not differ. It warns about both.

    ``baseline`` is the set of samples in which equal rewards make every advantage 0: the samples of a prompt ("group"), all
    samples ("batch"), or none ("none"). ``overlong`` is the penalty subtracted from rewards before advantages are computed.
    """

    baseline: str
    overlong: OverlongPenalty | None = None
    num_empty: int = field(default=0, init=False)
    num_flat: int = field(default=0, init=False)

    def observe(
        self,
        rollout_id: int,
        groups: Sequence[SampleGroup],
        num_waiting: int,
        drop_summary: str,
        example: SampleGroup | None,
    ) -> list[RunWarning]:
        """Count one rollout and return the warnings for the user.

        ``groups`` go to the trainer. ``num_waiting`` is the increase in groups that wait for a later rollout. ``drop_summary``
        describes what the filters dropped, and ``example`` is a group to quote if none passed them.
        """
        shaped = groups if self.overlong is None else self.overlong.penalise(groups)
        self.num_empty = 0 if groups or num_waiting > 0 else self.num_empty + 1
        self.num_flat = self.num_flat + 1 if groups and self._is_flat(shaped) else 0 if groups else self.num_flat
        quoted = _quote(groups[0] if groups else example)
        if _is_due(self.num_empty, FIRST_EMPTY):
            streak = f" ({self.num_empty} in a row)" if self.num_empty > 1 else ""
            return [RunWarning(f"rollout {rollout_id} is empty{streak}: nothing is trained on; {drop_summary}", quoted)]
        if groups and _is_due(self.num_flat, FIRST_FLAT):
            return [
                RunWarning(
                    f"{self.num_flat} rollouts in a row have no learning signal: {self._flatness(shaped)}", quoted
                )
            ]
        return []

    def metrics(self) -> list[Metric]:
        """Return the lengths of both streaks."""
        return [
            Last("rollout/empty_in_a_row", self.num_empty),
            Last("rollout/without_signal_in_a_row", self.num_flat),
        ]

    def _is_flat(self, groups: Sequence[SampleGroup]) -> bool:
        """Return True if no advantage can differ from 0 under the algorithm's baseline."""
        if self.baseline == "none":
            return False
        if len(_scores(groups)) == 1:
            return True
        return self.baseline == "group" and all(len(group.trained_scores) < 2 for group in groups)

    def _flatness(self, groups: Sequence[SampleGroup]) -> str:
        scores = _scores(groups)
        if len(scores) == 1:
            fix = (
                "does the response have the form that the reward reads?"
                if scores == {0.0}
                else "does the reward tell good responses from bad ones?"
            )
            return f"every sample has reward {scores.pop():g}, so every advantage is 0; {fix}"
        return (
            "in every group all samples have the same reward, so every advantage is 0; choose prompts that are "
            "neither too easy nor too hard, or raise rollout.n_samples_per_prompt or rollout.temperature"
        )


def _scores(groups: Sequence[SampleGroup]) -> set[float]:
    return set[float]().union(*(group.trained_scores for group in groups))


def _is_due(streak: int, first: int) -> bool:
    return streak == first or (streak > first and streak in REPEATS)


def _quote(group: SampleGroup | None) -> str:
    """Return the group's first sample with its label and reward, in one line; empty without a sample."""
    if group is None or not group.samples:
        return ""
    sample: Sample = group.samples[0]
    text = sample.text if len(sample.text) <= MAX_TEXT else sample.text[:MAX_TEXT] + "..."
    score = "no reward" if sample.reward is None else f"reward {sample.reward.score:g}"
    prompt = group.prompt
    return f"prompt {prompt.prompt_id} with label {prompt.label!r}, {score}, {sample.status}: {text!r}"
