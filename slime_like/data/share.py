"""Share of one rollout manager in a run with several managers: every ``num_shares``-th prompt, group and engine.

Group ids, and with them the samples' seeds, are those that a single manager would use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_like.interfaces import DataSource
from slime_like.metrics.types import Metric
from slime_like.types import Prompt


@dataclass(frozen=True, slots=True)
class ManagerShare:
    """Share number ``index`` of ``num_shares``. Example: share 1 of 2 contains items 1, 3, 5, ... of every sequence."""

    index: int = 0
    num_shares: int = 1

    @property
    def name(self) -> str:
        """Return the manager's name for messages."""
        return "rollout manager" if self.num_shares == 1 else f"rollout manager {self.index}"

    @property
    def file_name(self) -> str:
        """Return the manager's name for file names."""
        return self.name.replace(" ", "_")

    def size(self, total: int) -> int:
        """Return the size of this share of ``total`` items. ``total`` must be a multiple of ``num_shares``."""
        return total // self.num_shares

    def global_id(self, position: int) -> int:
        """Return the position among all items that corresponds to ``position`` in this share."""
        return position * self.num_shares + self.index

    def of[T](self, items: Sequence[T]) -> Sequence[T]:
        """Return the elements of ``items`` that belong to this share."""
        return items[self.index :: self.num_shares]


SINGLE = ManagerShare()  # share of the only manager


class SharedSource:
    """Data source of one share. Every manager advances its own copy of the source through all prompts and keeps its share."""

    def __init__(self, source: DataSource, share: ManagerShare) -> None:
        self._source, self._share = source, share

    def __len__(self) -> int:
        return len(self._source)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts of this share."""
        return list(self._share.of(self._source.next(num_prompts * self._share.num_shares)))

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of the whole source if this is the first share; empty for the others."""
        return self._source.metrics() if self._share.index == 0 else ()

    def state(self) -> Mapping[str, object]:
        """Return the cursor of the source."""
        return self._source.state()

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue at the source's cursor ``state``."""
        self._source.load_state(state)


def share_of_source(source: DataSource, share: ManagerShare) -> DataSource:
    """Return the data source of ``share``: ``source`` itself if there is a single manager."""
    return source if share.num_shares == 1 else SharedSource(source, share)
