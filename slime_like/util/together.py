"""Coroutines side by side, none of which outlives the others' failure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


def being_cancelled() -> bool:
    """Whether somebody cancelled the current task; a ``CancelledError`` that it meets otherwise is what its callee raised."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def together[T](calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the rest and waits for their end."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
