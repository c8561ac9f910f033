"""Carries over or drops groups that do not fill a rollout's optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.types import SampleGroup


@dataclass(frozen=True, slots=True)
class Split:
    """Groups to train on now, groups carried to the next rollout, and the number of dropped samples."""

    used: tuple[SampleGroup, ...]
    carried: tuple[SampleGroup, ...]
    num_dropped: int


def split_leftover(groups: Sequence[SampleGroup], samples_per_rollout: int, policy: str) -> Split:
    """Use complete groups, in order, up to ``samples_per_rollout`` samples; carry or drop the others by ``policy``.

    If samples are too few for a rollout (filters dropped groups), ``carry`` uses none and carries all, so that the caller
    collects more; ``drop`` trains on all of them in smaller steps. A first group that is larger than a rollout
    is used alone: it would never fit. An episode of several samples counts once, as rollout sizes count episodes.

    Example: of three groups of 4 samples, with 8 samples per rollout, two are used and the third is carried or dropped.
    """
    sizes = [len({sample.episode_id for sample in group.samples}) for group in groups]
    if sum(sizes) < samples_per_rollout:
        return Split((), tuple(groups), 0) if policy == "carry" else Split(tuple(groups), (), 0)
    count, total = 0, 0
    while count < len(groups) and (count == 0 or total + sizes[count] <= samples_per_rollout):
        total += sizes[count]
        count += 1
    used, unused = tuple(groups[:count]), tuple(groups[count:])
    return Split(used, unused, 0) if policy == "carry" else Split(used, (), sum(sizes[count:]))
