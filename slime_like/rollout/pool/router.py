"""Which engine answers a group: the one with the fewest outstanding tokens, of those that serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from slime_like.errors import EngineError, SlimeLikeError
from slime_like.rollout.engine.client import EngineClient

type Work[T] = Callable[[EngineClient], Coroutine[Any, Any, T]]


class Ask(Protocol):
    """How an engine is asked."""

    async def __call__[T](self, lease: Lease, work: Work[T]) -> T | None:
        """What ``work`` answers on the engine that ``lease`` has; ``None`` where that was lost, and serves no more."""
        ...


class Lease:
    """A group's hold on an engine, of ``outstanding`` tokens that may still be sampled."""

    def __init__(self, router: EngineRouter, outstanding: int, engine: EngineClient | None) -> None:
        self._router = router
        self.outstanding = outstanding
        self.engine = engine  # None while none serves

    @property
    def starved_s(self) -> float:
        """Seconds for which no engine has served so far."""
        return self._router.starved_s

    def spend(self, tokens: int) -> None:
        """``tokens`` of the outstanding ones were sampled."""
        self.outstanding = max(0, self.outstanding - tokens)

    async def settle(self) -> None:
        """Wait for an engine: its own while that serves, or else the least loaded one, where the group stays from then on.

        Raises what was passed to ``EngineRouter.fail``.
        """
        await self._router.settle(self)

    async def ask[T](self, work: Work[T]) -> T | None:
        """``work`` on the group's engine; ``None`` where that serves no more: the group is to be settled again."""
        if self.engine not in self._router.engines:
            return None
        return await self._router.ask(self, work)


class EngineRouter:
    """One engine per group; a group's continuations stay where its first turn went, as long as that engine serves."""

    def __init__(self, engines: Sequence[EngineClient], ask: Ask | None = None) -> None:
        self._engines = list(engines)
        self._leases: list[Lease] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._starved_at = None if engines else time.monotonic()
        self._starved_before = 0.0
        self.ask: Ask = ask or _trusting

    @property
    def engines(self) -> list[EngineClient]:
        """Those that serve now."""
        return list(self._engines)

    @property
    def starved_s(self) -> float:
        """Seconds for which no engine has served so far."""
        return self._starved_before + (0.0 if self._starved_at is None else time.monotonic() - self._starved_at)

    def admit(self, engine: EngineClient) -> None:
        """Groups may go to ``engine`` from now on."""
        if engine not in self._engines:
            self._engines.append(engine)
        self._starved_before, self._starved_at = self.starved_s, None
        self._wake()

    def withdraw(self, engine: EngineClient) -> None:
        """No further request goes to ``engine``; those it holds stay until they end."""
        self._engines = [other for other in self._engines if other is not engine]
        if not self._engines and self._starved_at is None:
            self._starved_at = time.monotonic()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Whoever waits for an engine, or asks for one from now on, gets ``error``."""
        self._failure = error
        self._wake()

    async def empty(self) -> None:
        """Wait until no engine serves."""
        while self._engines:
            await self._changed.wait()

    @contextmanager
    def lease(self, tokens: int) -> Generator[Lease]:
        """A hold on the least loaded engine, counted as having ``tokens`` more to sample until they are spent or the block
        ends. It has none yet where none serves: ``Lease.settle`` waits for it.
        """
        lease = Lease(self, tokens, self._least_loaded() if self._engines else None)
        self._leases.append(lease)
        try:
            yield lease
        finally:
            self._leases = [other for other in self._leases if other is not lease]

    async def settle(self, lease: Lease) -> None:
        """See ``Lease.settle``."""
        while self._failure is None and not self._engines:
            await self._changed.wait()
        if self._failure is not None:
            raise again(self._failure)
        if lease.engine not in self._engines:
            lease.engine = self._least_loaded()

    def _least_loaded(self) -> EngineClient:
        load = dict.fromkeys(self._engines, 0)
        for lease in self._leases:
            if lease.engine in load:
                load[lease.engine] += lease.outstanding
        return min(load, key=load.__getitem__)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _trusting[T](lease: Lease, work: Work[T]) -> T | None:
    """Engines that are not looked after: what one raises is raised."""
    assert lease.engine is not None
    return await work(lease.engine)


def again(error: Exception) -> Exception:
    """The same error, to be raised in another task."""
    same = (
        type(error)(str(error))
        if isinstance(error, SlimeLikeError)
        else EngineError(f"{type(error).__name__}: {error}")
    )
    same.__cause__ = error
    return same
