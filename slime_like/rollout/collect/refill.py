"""Dynamic sampling: groups dropped by filters are replaced by groups of further prompts until a rollout is full.

Prompts are taken in rounds, so they depend only on their order, never on which answer came first: a resumed run takes
the same prompts.
Source: DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime_like.errors import DataError
from slime_like.types import SampleGroup

Ask = Callable[[int, int], Awaitable[Sequence[SampleGroup]]]
"""(num_requested so far, num_groups now) -> scored groups of the next prompts."""


@dataclass(frozen=True, slots=True)
class RefillPolicy:
    """Rounds in which a rollout of ``batch_size`` groups is filled."""

    batch_size: int
    round_size: int | None  # prompts per round; None: batch_size, then the number still missing
    max_refills: int  # rounds after the first; 0: dropped groups are not replaced

    @property
    def max_groups(self) -> int:
        """Maximum number of groups that one rollout can request; spaces the group ids of rollouts."""
        return (self.round_size or self.batch_size) * (1 + self.max_refills)


@dataclass(frozen=True, slots=True)
class CollectedGroups:
    """Groups of one rollout that passed the filters, in prompt order, with counts."""

    groups: tuple[SampleGroup, ...]
    num_generated: int  # groups requested, dropped ones included
    num_refills: int  # rounds after the first


async def fill(ask: Ask, keep: Callable[[SampleGroup], bool], policy: RefillPolicy, rollout_id: int) -> CollectedGroups:
    """Request groups until ``batch_size`` of them passed ``keep``; large rounds may return more.

    Raises ``DataError`` if too few passed after ``max_refills`` rounds, as with a filter that hardly any prompt passes.
    """
    passed: list[SampleGroup] = []
    num_requested, size = 0, policy.round_size or policy.batch_size
    for num_refills in range(policy.max_refills + 1):
        passed += [group for group in await ask(num_requested, size) if keep(group)]
        num_requested += size
        missing = policy.batch_size - len(passed)
        if missing <= 0 or policy.max_refills == 0:
            return CollectedGroups(tuple(passed), num_requested, num_refills)
        size = policy.round_size or missing
    raise DataError(
        f"rollout {rollout_id}: after rollout.max_refills={policy.max_refills} rounds of further prompts {len(passed)} of "
        f"{num_requested} groups passed rollout.filters, and rollout.batch_size={policy.batch_size} are needed: raise "
        "rollout.max_refills, train on prompts that are neither too easy nor too hard, or set rollout.max_refills=0 to "
        "train on what passes"
    )
