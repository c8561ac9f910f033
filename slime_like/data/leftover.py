"""Selection of the groups that a rollout trains on; the others are carried to the next rollout or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
