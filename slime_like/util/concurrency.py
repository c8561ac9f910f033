"""Concurrent coroutines; the first failure cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


def is_task_cancelled() -> bool:
    """Return whether the current task itself is being cancelled.

    If False, a ``CancelledError`` caught here came from an awaited call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def gather_or_cancel[T](calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the other calls and waits for them to finish."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, None]) -> None:
    """Wait for the first of ``waits``, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
