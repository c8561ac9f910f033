"""Dynamic sampling: groups that filters dropped are replaced by groups of further prompts, until a rollout is full.

Rounds, not a stream: which prompts a rollout takes then follows from their order alone, never from which answer came
first, so that a resumed run takes the same ones.
Source: DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slime_like.errors import DataError
from slime_like.types import SampleGroup

Ask = Callable[[int, int], Awaitable[Sequence[SampleGroup]]]
"""(groups asked for before, how many now) -> scored groups of the next prompts."""


@dataclass(frozen=True, slots=True)
class RefillPolicy:
    """How a rollout of ``batch_size`` groups is filled."""

    batch_size: int
    round_size: int | None  # prompts per round; None: batch_size, then as many as are missing
    max_refills: int  # rounds after the first; 0: what filters drop is not replaced

    @property
    def most(self) -> int:
        """Groups that one rollout can ask for: the room their ids need."""
        return (self.round_size or self.batch_size) * (1 + self.max_refills)


@dataclass(frozen=True, slots=True)
class CollectedGroups:
    """What passed the filters, in the order of the prompts, and what it took."""

    groups: tuple[SampleGroup, ...]
    num_generated: int
    num_refills: int


async def fill(ask: Ask, keep: Callable[[SampleGroup], bool], how: RefillPolicy, rollout_id: int) -> CollectedGroups:
    """Ask until ``batch_size`` groups passed; there may be more of them when rounds are large.

    Raises ``DataError`` when ``max_refills`` rounds did not do, as with a filter that hardly any prompt passes.
    """
    kept: list[SampleGroup] = []
    asked, size = 0, how.round_size or how.batch_size
    for refills in range(how.max_refills + 1):
        kept += [group for group in await ask(asked, size) if keep(group)]
        asked += size
        missing = how.batch_size - len(kept)
        if missing <= 0 or how.max_refills == 0:
            return CollectedGroups(tuple(kept), asked, refills)
        size = how.round_size or missing
    raise DataError(
        f"rollout {rollout_id}: after rollout.max_refills={how.max_refills} rounds of further prompts {len(kept)} of "
        f"{asked} groups passed rollout.filters, and rollout.batch_size={how.batch_size} are needed: raise "
        "rollout.max_refills, train on prompts that are neither too easy nor too hard, or set rollout.max_refills=0 to "
        "train on what passes"
    )
