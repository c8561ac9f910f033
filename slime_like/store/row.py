"""Handle of a row of a ``SampleStore``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_like.store.columns import TokenColumns
from slime_like.store.store import Batch, SampleStore
from slime_like.types import RoutedExperts


@dataclass(frozen=True, slots=True, eq=False)
class StoreRow:
    """One sequence of a store."""

    store: SampleStore
    index: int

    def __len__(self) -> int:
        return self.store.length(self.index)

    @property
    def columns(self) -> TokenColumns:
        """Read-only views of the columns of all tokens."""
        return self.store.columns(self.index)

    def fork(self, length: int | None = None) -> StoreRow:
        """Return a new row that shares the memory of the first ``length`` tokens, all by default."""
        return StoreRow(self.store, self.store.fork(self.index, length)[0])

    def append(self, columns: TokenColumns, experts: RoutedExperts | None = None) -> None:
        """Append tokens. ``experts`` has the experts of all tokens of the row, including the earlier ones."""
        counts = np.array([len(columns)])
        self.store.append_batch(Batch(np.array([self.index]), columns, counts, (experts,)))

    def release(self) -> None:
        """Remove the row from its store."""
        self.store.release([self.index])
