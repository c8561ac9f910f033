"""Clocks for the time that a rank spends in exchanges within its DCP group. They do not synchronise with a GPU.

On a CPU, an exchange ends when its call returns, so a host clock measures every one. On a GPU, events are recorded before and
after every ``STRIDE``-th exchange and read when the time is reported. Events within a CUDA graph hold only the times of
its last replay, so the mean over the graphs that were replayed is multiplied by the number of replays since the last report.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

STRIDE = 7  # not a multiple of the 1 to 3 exchanges per layer, so that each kind is measured equally often
METHODS = ("all_gather", "all_reduce", "all_to_all_single", "reduce_scatter_along_dim")
"""Methods of SGLang's ``GroupCoordinator`` that DCP uses for its exchanges."""


class ExchangeClock(Protocol):
    """Clock that measures the time that this rank spends in exchanges."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that measures the exchange within it."""
        ...

    def take(self, num_replays: int) -> float:
        """Return the seconds spent in exchanges since the last call; a GPU clock estimates them.

        ``num_replays`` is the number of CUDA graph replays in that time.
        """
        ...


class HostClock:
    """Exchange clock that reads the host's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin

    def take(self, num_replays: int) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(slots=True)
class CapturedExchanges:
    """Events captured in one CUDA graph."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    replayed_at: float = -1.0  # time of the last replay that was read, in milliseconds after the clock's origin


class DeviceClock:
    """Exchange clock that records events on a GPU. ``device`` is ``torch.cuda``."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._num_exchanges = 0
        self._is_capturing = False
        self._eager: list[tuple[Any, Any]] = []
        self._graphs: list[CapturedExchanges] = []
        self._origin = device.Event(enable_timing=True)
        self._origin.record()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        pairs = self._pairs()
        self._num_exchanges += 1
        if self._num_exchanges % STRIDE:
            yield
            return
        begin, end = (self._device.Event(enable_timing=True, external=self._is_capturing) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            pairs.append((begin, end))

    def take(self, num_replays: int) -> float:
        pairs, self._eager = self._eager, []
        milliseconds = 0.0
        for begin, end in pairs:
            if end.query():
                milliseconds += begin.elapsed_time(end)
            else:
                self._eager.append((begin, end))
        replays = [replay for graph in self._graphs if (replay := self._replayed(graph)) is not None]
        per_replay = sum(replays) / len(replays) if replays else 0.0
        return 1e-3 * STRIDE * (milliseconds + num_replays * per_replay)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return the list for the next pair of events: that of the graph being captured, or ``_eager`` outside a capture.

        The first exchange captured after an uncaptured one begins a new graph. Between two graphs there always is an uncaptured
        exchange, because SGLang runs each batch size without a graph before it captures the graph.
        """
        was_capturing, self._is_capturing = self._is_capturing, bool(self._device.is_current_stream_capturing())
        if not self._is_capturing:
            return self._eager
        if not was_capturing:
            self._graphs.append(CapturedExchanges())
        return self._graphs[-1].pairs

    def _replayed(self, graph: CapturedExchanges) -> float | None:
        """Return the milliseconds of a graph's measured exchanges in its last replay.

        The result is None if the graph has no measured exchange or was never replayed, if its last replay has not ended, or if
        an earlier call returned the time of that replay.
        """
        if not graph.pairs or not graph.pairs[-1][1].query():
            return None
        try:
            replayed_at = self._origin.elapsed_time(graph.pairs[-1][1])
        except RuntimeError:  # CUDA refuses an event that only a capture recorded: the graph was never replayed
            if graph.replayed_at >= 0:
                raise
            return None
        if replayed_at == graph.replayed_at:
            return None
        graph.replayed_at = replayed_at
        return sum(begin.elapsed_time(end) for begin, end in graph.pairs)


_clocks: list[ExchangeClock] = []  # clock of this process's DCP group; at most one


def take(num_replays: int) -> float | None:
    """Return the seconds in exchanges since the last call, from this rank's ``ExchangeClock``; None if the engine has no DCP."""
    return _clocks[0].take(num_replays) if _clocks else None


def measure(group: Any, clock: ExchangeClock) -> None:
    """Wrap ``METHODS`` of ``group`` so that ``clock`` measures their calls, and make ``clock`` the clock of this process."""
    for name in METHODS:
        setattr(group, name, _timed(getattr(group, name), clock))
    _clocks[:] = [clock]


def unmeasured(group: Any, name: str) -> Callable[..., Any]:
    """Return the method ``name`` of ``group`` without the clock, for a collective that is not part of attention."""
    return functools.partial(getattr(type(group), name), group)  # ``measure`` sets attributes of the instance only


def _timed(exchange: Callable[..., Any], clock: ExchangeClock) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.running():
            return exchange(*args, **kwargs)

    return timed
