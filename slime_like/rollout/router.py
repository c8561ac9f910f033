"""Which engine answers a group: the one with the fewest outstanding tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slime_like.rollout.client import EngineClient


@dataclass(slots=True)
class Lease:
    """A group's hold on its engine, of ``outstanding`` tokens that may still be sampled."""

    engine: EngineClient
    index: int
    outstanding: int

    def spend(self, tokens: int) -> None:
        """``tokens`` of the outstanding ones were sampled."""
        self.outstanding = max(0, self.outstanding - tokens)


class Router:
    """One engine per group; a group's continuations stay where its first turn went."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = list(engines)
        self._leases: list[Lease] = []

    @contextmanager
    def lease(self, tokens: int) -> Generator[Lease]:
        """The least loaded engine, counted as having ``tokens`` more to sample until they are spent or the block ends."""
        load = [0] * len(self.engines)
        for lease in self._leases:
            load[lease.index] += lease.outstanding
        index = min(range(len(load)), key=load.__getitem__)
        lease = Lease(self.engines[index], index, tokens)
        self._leases.append(lease)
        try:
            yield lease
        finally:
            self._leases = [other for other in self._leases if other is not lease]
