"""Scalar reference of ``SampleStore``: Python lists, one token at a time, every fork a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slime_like.store.columns import TokenColumns
from slime_like.store.store import SampleStore

BLOCKS, TOP = 2, 2
EXPERT_DTYPE = np.dtype(np.uint8)


@dataclass(slots=True)
class ScalarRow:
    """One sequence."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    experts: list[list[list[int]]] | None = None
    is_finished: bool = False

    def fork(self, length: int) -> ScalarRow:
        """Return a copy of the first ``length`` tokens."""
        experts = None if self.experts is None else self.experts[:length]
        return ScalarRow(self.token_ids[:length], self.logprobs[:length], self.versions[:length], experts)

    def append(self, tokens: Sequence[tuple[int, float, int]], experts: list[list[list[int]]] | None) -> None:
        """Append tokens; ``experts`` replace those of the row from its first token on, and missing ones are zeros."""
        for token_id, logprob, version in tokens:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.versions.append(version)
        zero = [[0] * TOP] * BLOCKS
        experts_kept = self.experts if experts is None else experts[: len(self.token_ids)]
        if experts_kept is not None:
            self.experts = [*experts_kept, *[zero] * (len(self.token_ids) - len(experts_kept))]

    def columns(self) -> TokenColumns:
        """Return the row as arrays."""
        experts = (
            None
            if self.experts is None
            else np.array(self.experts, EXPERT_DTYPE).reshape(len(self.token_ids), BLOCKS, TOP)
        )
        return TokenColumns(
            np.array(self.token_ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            experts,
        )


def flat(tokens: Sequence[tuple[int, float, int]]) -> TokenColumns:
    """Return tokens as columns."""
    return replace(ScalarRow([t for t, _, _ in tokens], [p for _, p, _ in tokens], [v for _, _, v in tokens]).columns())


def assert_same(actual: TokenColumns, expected: TokenColumns) -> None:
    """Assert that all columns have the same dtype, shape and bytes."""
    for name in ("token_ids", "logprobs", "versions", "experts"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def tables(store: SampleStore) -> tuple[object, ...]:
    """Return the state of a store that a failed append must not change: memory, counts of copies, shape of experts."""
    return store.nbytes, [*store._slabs], store.num_clones, store.num_moves, store._entry
