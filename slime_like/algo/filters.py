"""Group filters (table FILTERS). A filter returns None to keep a group, or the reason to drop it; reasons are counted."""

from __future__ import annotations

from slime_like.types import SampleGroup, Status


def nonzero_std(group: SampleGroup) -> str | None:
    """Drop a group whose trained samples have fewer than two different rewards.

    All group advantages computed by this project would be 0, unless ``reward.overlong_buffer_len`` penalises some of the
    samples later. A user's group advantages may differ.

    Source: DAPO's dynamic sampling, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    return None if len(group.trained_scores) > 1 else "zero_std"


def completed(group: SampleGroup) -> str | None:
    """Drop a group with a sample that is not completed; the reason is the status of the first such sample."""
    return next((str(s.status) for s in group.samples if s.status is not Status.COMPLETED), None)
