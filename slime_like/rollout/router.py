"""Which engine answers a group: the one with the fewest outstanding tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from slime_like.rollout.client import EngineClient


class Router:
    """One engine per group; a group's continuations stay where its first turn went."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = list(engines)
        self._outstanding = [0] * len(self.engines)

    @asynccontextmanager
    async def lease(self, tokens: int) -> AsyncGenerator[EngineClient]:
        """The least loaded engine, counted as holding ``tokens`` more until the block ends."""
        index = min(range(len(self.engines)), key=self._outstanding.__getitem__)
        self._outstanding[index] += tokens
        try:
            yield self.engines[index]
        finally:
            self._outstanding[index] -= tokens
