"""Which groups are worth training on (table FILTERS). ``None`` keeps a group; a reason drops it and is counted."""

from __future__ import annotations

from slime_like.types import SampleGroup, Status

UNSCORED = (Status.FAILED, Status.ABORTED)  # stand in no baseline and are not trained on


def nonzero_std(group: SampleGroup) -> str | None:
    """Drop a group whose scored samples all have the same reward: every advantage in it would be zero.

    Source: DAPO's dynamic sampling, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    scores = {s.reward.score for s in group.samples if s.reward is not None and s.status not in UNSCORED}
    return None if len(scores) > 1 else "zero_std"


def completed(group: SampleGroup) -> str | None:
    """Drop a group in which a sample did not end by itself; the reason names the first such status."""
    return next((str(s.status) for s in group.samples if s.status is not Status.COMPLETED), None)
