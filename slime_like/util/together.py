"""Concurrent coroutines with cancellation: the first failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


def being_cancelled() -> bool:
    """Return True if the current task was cancelled; otherwise a ``CancelledError`` in it was raised by a callee."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def together[T](calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the other calls and waits for them to finish."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
