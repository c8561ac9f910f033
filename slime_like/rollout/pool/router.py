"""Engine router: a group goes to the serving engine with the fewest outstanding tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from slime_like.errors import EngineError, SlimeLikeError
from slime_like.rollout.engine.client import EngineClient

type Work[T] = Callable[[EngineClient], Coroutine[Any, Any, T]]


class RunOnEngine(Protocol):
    """Runs work on the engine of a lease."""

    async def __call__[T](self, lease: Lease, work: Work[T]) -> T | None:
        """Run ``work`` on the leased engine; None if that engine was lost."""
        ...


class Lease:
    """Assignment of a group to an engine, with ``outstanding`` tokens that may still be sampled."""

    def __init__(self, router: EngineRouter, outstanding: int, engine: EngineClient | None) -> None:
        self._router = router
        self.outstanding = outstanding
        self.engine = engine  # None while none serves

    @property
    def starved_s(self) -> float:
        """Total seconds without a serving engine."""
        return self._router.starved_s

    def spend(self, tokens: int) -> None:
        """Subtract ``tokens`` that were sampled from the outstanding ones."""
        self.outstanding = max(0, self.outstanding - tokens)

    async def settle(self) -> None:
        """Wait for an engine: the assigned one while it serves, otherwise the least loaded one, where the group then stays.

        Raises the error passed to ``EngineRouter.fail``.
        """
        await self._router.settle(self)

    async def ask[T](self, work: Work[T]) -> T | None:
        """Run ``work`` on the group's engine; None if it no longer serves and the lease must be settled again."""
        if self.engine not in self._router.engines:
            return None
        return await self._router.ask(self, work)


class EngineRouter:
    """Assigns one engine per group; continuations of a group stay on its engine while that serves."""

    def __init__(self, engines: Sequence[EngineClient], ask: RunOnEngine | None = None) -> None:
        self._engines = list(engines)
        self._leases: list[Lease] = []
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._starved_at = None if engines else time.monotonic()
        self._starved_before = 0.0
        self.ask: RunOnEngine = ask or _run_unsupervised

    @property
    def engines(self) -> list[EngineClient]:
        """Engines that serve now."""
        return list(self._engines)

    @property
    def starved_s(self) -> float:
        """Total seconds without a serving engine."""
        return self._starved_before + (0.0 if self._starved_at is None else time.monotonic() - self._starved_at)

    def admit(self, engine: EngineClient) -> None:
        """Let groups go to ``engine``."""
        if engine not in self._engines:
            self._engines.append(engine)
        self._starved_before, self._starved_at = self.starved_s, None
        self._wake()

    def withdraw(self, engine: EngineClient) -> None:
        """Send no further request to ``engine``; its current requests continue until they end."""
        self._engines = [remaining for remaining in self._engines if remaining is not engine]
        if not self._engines and self._starved_at is None:
            self._starved_at = time.monotonic()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` to every present and future waiter for an engine."""
        self._failure = error
        self._wake()

    async def empty(self) -> None:
        """Wait until no engine serves."""
        while self._engines:
            await self._changed.wait()

    @contextmanager
    def lease(self, tokens: int) -> Generator[Lease]:
        """Lease the least loaded engine; ``tokens`` count as its load until they are spent or the block ends. The lease has no
        engine while none serves: ``Lease.settle`` waits for one.
        """
        lease = Lease(self, tokens, self._least_loaded() if self._engines else None)
        self._leases.append(lease)
        try:
            yield lease
        finally:
            self._leases = [remaining for remaining in self._leases if remaining is not lease]

    async def settle(self, lease: Lease) -> None:
        """See ``Lease.settle``."""
        while self._failure is None and not self._engines:
            await self._changed.wait()
        if self._failure is not None:
            raise copy_error(self._failure)
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


async def _run_unsupervised[T](lease: Lease, work: Work[T]) -> T | None:
    """Run ``work`` on engines without a pool: its errors are raised as they are."""
    assert lease.engine is not None
    return await work(lease.engine)


def copy_error(error: Exception) -> Exception:
    """Return a copy of ``error`` to be raised in another task."""
    copy = (
        type(error)(str(error))
        if isinstance(error, SlimeLikeError)
        else EngineError(f"{type(error).__name__}: {error}")
    )
    copy.__cause__ = error
    return copy
