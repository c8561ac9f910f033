"""Selection, in the driver, of the groups that a rollout trains on, from the groups of all rollout managers.

Groups beyond ``samples_per_rollout`` are carried to the next rollout or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from slime_like.data.dump import load_groups
from slime_like.data.faults import Recovery
from slime_like.metrics.types import Last, Metric, RunWarning, Sum
from slime_like.reward.shuffle import shuffle_rewards
from slime_like.rollout.collect.learning_signal import LearningSignal
from slime_like.rollout.collect.state import write_groups
from slime_like.types import SampleGroup


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """Groups to train on now, groups carried to the next rollout, and the number of dropped samples."""

    to_train: tuple[SampleGroup, ...]
    to_carry: tuple[SampleGroup, ...]
    num_dropped: int


def split_leftover(groups: Sequence[SampleGroup], samples_per_rollout: int, policy: str) -> GroupSplit:
    """Select whole groups, in order, up to ``samples_per_rollout`` samples, and carry or drop the others by ``policy``.

    If there are too few samples for a rollout, ``carry`` carries all groups, so that the caller collects more, and ``drop``
    selects all of them for smaller steps. A first group larger than a rollout is selected alone, as it would never fit.
    An episode of several samples counts once.

    Example: of three groups of 4 samples, with 8 samples per rollout, two are used and the third is carried or dropped.
    """
    sizes = [len({sample.episode_id for sample in group.samples}) for group in groups]
    if sum(sizes) < samples_per_rollout:
        return GroupSplit((), tuple(groups), 0) if policy == "carry" else GroupSplit(tuple(groups), (), 0)
    count, total = 0, 0
    while count < len(groups) and (count == 0 or total + sizes[count] <= samples_per_rollout):
        total += sizes[count]
        count += 1
    first, remaining = tuple(groups[:count]), tuple(groups[count:])
    return GroupSplit(first, remaining, 0) if policy == "carry" else GroupSplit(first, (), sum(sizes[count:]))


@dataclass(frozen=True, slots=True)
class ManagerRollout:
    """Groups of one rollout from one manager, scored and filtered, ordered by id."""

    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds: when generation began and ended
    stopped: float
    version: int  # weight version of the last push
    metrics: tuple[Metric, ...] = ()
    messages: tuple[str, ...] = ()  # warnings for the user
    recoveries: tuple[Recovery, ...] = ()  # new or changed since the last rollout
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
    recoveries: tuple[
        Recovery, ...
    ] = ()  # new or changed since the last rollout; a later entry replaces an earlier one


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
        """Return whole groups that fill the rollout's optimizer steps, carried-over groups first; carry or drop the others."""
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
        """Continue with the groups that ``save`` wrote."""
        self._leftover = load_groups(path)
