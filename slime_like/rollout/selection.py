"""Select the groups to train on in a rollout, among the groups of all rollout managers. Runs in the driver.

Groups beyond ``samples_per_rollout`` are carried to the next rollout or dropped. Warnings report rollouts without
learning signal (no group left to train on, or rewards that do not differ).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.data.dump import load_groups
from slime_like.data.faults import Recovery
from slime_like.data.overlong import OverlongPenalty
from slime_like.metrics.types import Last, Metric, RunWarning, Sum
from slime_like.reward.shuffle import shuffle_rewards
from slime_like.rollout.collect.state import write_groups
from slime_like.types import Sample, SampleGroup

FIRST_EMPTY, FIRST_FLAT = 1, 3  # consecutive rollouts before the first warning
REPEATS = (10, 30, 100, 300, 1000, 3000, 10000)  # lengths of a streak at which the warning is repeated
MAX_TEXT = 400  # characters of a quoted sample


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """Groups to train on now, groups carried to the next rollout, and the number of dropped samples.

    An episode of several samples counts as one sample.
    """

    to_train: tuple[SampleGroup, ...]
    to_carry: tuple[SampleGroup, ...]
    num_dropped: int


def split_leftover(groups: Sequence[SampleGroup], samples_per_rollout: int, policy: str) -> GroupSplit:
    """Select whole groups, in order, up to ``samples_per_rollout`` samples, and carry or drop the others by ``policy``.

    If there are too few samples for a rollout, ``carry`` selects none and carries all groups, and ``drop`` selects them all,
    so that optimizer steps are smaller. If the first group alone exceeds a rollout, only it is selected. An episode of several
    samples counts as one sample.

    Example: of three groups of 4 samples, with 8 samples per rollout, two are used and the third is carried or dropped.
    """
    sizes = [len({sample.episode_id for sample in group.samples}) for group in groups]
    if sum(sizes) < samples_per_rollout:
        return GroupSplit((), tuple(groups), 0) if policy == "carry" else GroupSplit(tuple(groups), (), 0)
    num_groups, num_samples = 0, 0
    while num_groups < len(groups) and (num_groups == 0 or num_samples + sizes[num_groups] <= samples_per_rollout):
        num_samples += sizes[num_groups]
        num_groups += 1
    selected_groups, leftover_groups = tuple(groups[:num_groups]), tuple(groups[num_groups:])
    if policy == "carry":
        return GroupSplit(selected_groups, leftover_groups, 0)
    return GroupSplit(selected_groups, (), sum(sizes[num_groups:]))


@dataclass(frozen=True, slots=True)
class ManagerRollout:
    """Groups of one rollout from one manager, scored and filtered, ordered by id."""

    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds: when generation began and ended
    stopped: float
    version: int  # weight version of the last push
    metrics: tuple[Metric, ...] = ()
    messages: tuple[str, ...] = ()  # warnings for the user
    recoveries: tuple[Recovery, ...] = ()  # as returned by ``RolloutManager.last_recoveries``
    drop_summary: str = ""  # clause about generated and dropped groups
    example: SampleGroup | None = None  # first generated group, quoted in a warning if none passed the filters


@dataclass(frozen=True, slots=True)
class CollectedRollout:
    """Input of the trainer for one rollout: complete groups, scored and filtered."""

    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds: when generation of this rollout began and ended
    stopped: float
    metrics: tuple[Metric, ...]
    warnings: tuple[RunWarning, ...] = ()
    recoveries: tuple[Recovery, ...] = ()  # of all managers; an entry replaces an earlier one of the same loss


@dataclass(frozen=True, slots=True)
class SelectionSpec:
    """Settings of the selection."""

    samples_per_rollout: int
    leftover: str  # loop.leftover
    max_staleness: int  # weight versions that a group may lag behind the trainer
    shuffle: bool  # reward.shuffle
    seed: int


class GroupSelection:
    """Selector of each rollout's groups, which include groups carried over from earlier rollouts."""

    def __init__(self, spec: SelectionSpec, signal: LearningSignal) -> None:
        self._spec, self._signal = spec, signal
        self._leftover: tuple[SampleGroup, ...] = ()

    def select(self, rollout_id: int, parts: Sequence[ManagerRollout]) -> CollectedRollout:
        """Return the groups to train on in this rollout, carried-over groups first, with metrics and warnings.

        Carried-over groups that lag by more than ``max_staleness`` versions are dropped. All other groups are selected, carried
        over or dropped as in ``split_leftover``. With ``shuffle``, the rewards of the selected groups are permuted.
        """
        spec = self._spec
        generated_groups = sorted((group for part in parts for group in part.groups), key=lambda group: group.group_id)
        oldest_version = max(part.version for part in parts) - spec.max_staleness
        carried_groups = [group for group in self._leftover if group.oldest_version >= oldest_version]
        num_stale = len(self._leftover) - len(carried_groups)
        split = split_leftover([*carried_groups, *generated_groups], spec.samples_per_rollout, spec.leftover)
        # Copy carried groups: as views of a manager's entire rollout, arrays from Ray would keep all its shared memory in use.
        groups, self._leftover = split.to_train, tuple(deepcopy(group) for group in split.to_carry)
        if spec.shuffle:
            groups = tuple(shuffle_rewards(groups, seed=spec.seed * 1_000_003 + rollout_id))
        advice = self._signal.observe(
            rollout_id,
            groups,
            len(self._leftover) - len(carried_groups),
            " and ".join(part.drop_summary for part in parts),
            next((part.example for part in parts if part.example is not None), None),
        )
        metrics = [
            *(metric for part in parts for metric in part.metrics),
            *self._signal.metrics(),
            *([Sum("rollout/dropped_groups/stale", num_stale)] if spec.leftover == "carry" else []),
            Last("rollout/carried_groups", len(self._leftover)),
            Sum("rollout/dropped_samples", split.num_dropped),
        ]
        return CollectedRollout(
            groups,
            min(part.started for part in parts),
            max(part.stopped for part in parts),
            tuple(metrics),
            (*advice, *(RunWarning(message) for part in parts for message in part.messages)),
            tuple(recovery for part in parts for recovery in part.recoveries),
        )

    def save(self, path: Path) -> None:
        """Write the groups carried over. Raises ``CheckpointError`` if the file cannot be written."""
        write_groups(path, self._leftover)

    def load(self, path: Path) -> None:
        """Continue with the groups that ``save`` wrote. Raises ``DataError`` as ``load_groups`` does."""
        self._leftover = load_groups(path)


@dataclass(slots=True)
class LearningSignal:
    """Counter of consecutive rollouts without groups to train on, or in which rewards do not differ. It warns about both.

    If a rollout without groups to train on carries new groups to a later rollout, it is not counted, and ends the streak of
    rollouts without groups. A streak of rollouts in which rewards do not differ continues over rollouts without groups.

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

        ``groups`` go to the trainer. ``num_waiting`` is the number of groups carried to a later rollout, minus the number of
        groups carried to this one that were not dropped as stale. ``drop_summary`` is a clause about generated and dropped
        groups. ``example`` is a group to quote if ``groups`` is empty.
        """
        shaped = groups if self.overlong is None else self.overlong.penalise(groups)
        self.num_empty = 0 if groups or num_waiting > 0 else self.num_empty + 1
        self.num_flat = self.num_flat + 1 if groups and self._is_flat(shaped) else 0 if groups else self.num_flat
        quotation = _quote(groups[0] if groups else example)
        if _is_due(self.num_empty, FIRST_EMPTY):
            streak = f" ({self.num_empty} in a row)" if self.num_empty > 1 else ""
            return [
                RunWarning(f"rollout {rollout_id} is empty{streak}: nothing is trained on; {drop_summary}", quotation)
            ]
        if groups and _is_due(self.num_flat, FIRST_FLAT):
            return [
                RunWarning(
                    f"{self.num_flat} rollouts in a row have no learning signal: {self._flatness(shaped)}", quotation
                )
            ]
        return []

    def metrics(self) -> list[Metric]:
        """Return the lengths of the current streaks: rollouts without groups, and rollouts in which rewards do not differ."""
        return [
            Last("rollout/empty_in_a_row", self.num_empty),
            Last("rollout/without_signal_in_a_row", self.num_flat),
        ]

    def _is_flat(self, groups: Sequence[SampleGroup]) -> bool:
        """Return True if the rewards make every advantage 0 under the algorithm's baseline."""
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
    """Describe the group's first sample: prompt id, label, reward, status and text. Return "" if there is no sample."""
    if group is None or not group.samples:
        return ""
    sample: Sample = group.samples[0]
    text = sample.text if len(sample.text) <= MAX_TEXT else sample.text[:MAX_TEXT] + "..."
    score = "no reward" if sample.reward is None else f"reward {sample.reward.score:g}"
    prompt = group.prompt
    return f"prompt {prompt.prompt_id} with label {prompt.label!r}, {score}, {sample.status}: {text!r}"
