"""Fake engine whose requests advance in an order drawn from the test's seed, which a real engine cannot reproduce."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slime_like.errors import EngineLost
from slime_like.interfaces import Completion, EngineAddress, Sampling
from slime_like.rollout.engine.connection import KvUsage
from slime_like.types import F32, I32


def token(seed: int, position: int) -> int:
    """Return the token that a seed draws at a position, independent of where its request began."""
    return (seed * 31 + position * 17) % 997


@dataclass(eq=False)
class SlowRequest:
    """Sample in flight."""

    start: int
    seed: int
    max_tokens: int
    spans: list[int] = field(default_factory=list)  # version of each token
    registered: bool = False  # known to the engine, so that an abort ends it
    finish: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def completion(self) -> Completion:
        ids = np.array([token(self.seed, self.start + i) for i in range(len(self.spans))], np.int32)
        spans = tuple((i, i + 1, version) for i, version in enumerate(self.spans))
        return Completion(ids, ids.astype(np.float32), spans, self.finish, self.start, 0)


class SlowEngine:
    """Fake ``EngineClient``, which dies with probability 1 / ``dies`` per step (0: never)."""

    def __init__(self, rng: random.Random, version: int, name: str = "engine", dies: int = 0) -> None:
        self.num_aborts = 0  # also the number of ended aborts: ``abort_all`` never yields to another task
        self.version, self.name, self.url = version, name, "nowhere"
        self.address = EngineAddress(name, self.url, "", 1)
        self.num_dp_ranks = 1
        self._rng, self._dies = rng, dies
        self._requests: list[SlowRequest] = []
        self._dead = False

    @property
    def num_ended_aborts(self) -> int:
        return self.num_aborts

    @staticmethod
    def length(seed: int) -> int:
        return 1 + seed % 7

    async def kv_usage(self, seconds: float | None = None) -> KvUsage:
        self._refuse_dead()
        return KvUsage(capacity_tokens=1, used_tokens_max=0, running_requests_max=0, retractions=0)

    async def extend(
        self,
        token_ids: Sequence[I32],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling,
        *,
        for_training: bool = True,
        dp_rank: int | None = None,
    ) -> list[Completion]:
        self._refuse_dead()
        requests = [SlowRequest(len(ids), s, n) for ids, s, n in zip(token_ids, seeds, max_new_tokens, strict=True)]
        self._requests += requests
        try:
            await asyncio.gather(*(request.done.wait() for request in requests))
        finally:
            self._requests = [request for request in self._requests if request not in requests]
        self._refuse_dead()
        return [request.completion() for request in requests]

    async def abort_all(self) -> None:
        self.num_aborts += 1
        self._refuse_dead()
        for request in self._requests:
            if request.registered and not request.finish:
                self._end(request, "abort")
            request.registered = True

    async def run(self) -> None:
        """Advance one request at a time until the engine dies."""
        while not self._dead:
            await asyncio.sleep(0)
            running_requests = [request for request in self._requests if not request.finish]
            if not running_requests:
                continue
            if self._dies and not self._rng.randrange(self._dies):
                self.die()
                continue
            request = self._rng.choice(running_requests)
            request.registered = True
            request.spans.append(self.version)
            if len(request.spans) == request.max_tokens:
                self._end(request, "length")

    async def score(self, token_ids: Sequence[I32], temperature: float) -> list[F32]:
        self._refuse_dead()
        return [ids[1:].astype(np.float32) for ids in token_ids]

    def die(self) -> None:
        self._dead = True
        for request in self._requests:
            self._end(request, "lost")

    async def restore_memory(self, parts: Sequence[str]) -> None:
        """Do nothing: no memory was released."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _refuse_dead(self) -> None:
        if self._dead:
            raise EngineLost(f"{self.name} is dead")

    def _end(self, request: SlowRequest, finish: str) -> None:
        request.finish = finish
        request.done.set()


class SlowSupervisor:
    """``EngineSupervisor`` of successive slow engines, each with a longer expected life."""

    def __init__(self, rng: random.Random, version: int, name: str, dies: int) -> None:
        self._rng, self._name, self._dies = rng, name, dies
        self.version = version
        self.num_stops = 0  # calls of ``stop_server``
        self.tasks: list[asyncio.Task[None]] = []
        self.client = self._start()

    async def restart(self) -> tuple[SlowEngine, str]:
        """Start the next engine after a random number of steps."""
        for _ in range(self._rng.randrange(20)):
            await asyncio.sleep(0)
        self._dies = math.ceil(self._dies * 1.1)  # otherwise a long answer may never finish
        self.client = self._start()
        return self.client, ""

    async def stop_server(self) -> None:
        self.num_stops += 1

    async def stopped_pids(self) -> tuple[int, ...]:
        return ()

    def push(self, version: int) -> None:
        self.version = self.client.version = version

    def _start(self) -> SlowEngine:
        engine = SlowEngine(self._rng, self.version, self._name, self._dies)
        self.tasks.append(asyncio.create_task(engine.run()))
        return engine
