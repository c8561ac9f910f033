"""Run coroutines concurrently, cancelling the rest when one fails or finishes, and run blocking calls in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast


def is_task_cancelled() -> bool:
    """Return whether the current task itself is being cancelled.

    If False, a ``CancelledError`` caught here came from an awaited call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def gather_or_cancel[T](calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; on the first failure, cancel the rest and await them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, None]) -> None:
    """Run ``waits`` until the first of them ends, and cancel the others. Exceptions of all of them are dropped."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_thread[**P, R](function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking call in a new thread and return its result.

    After a cancellation the thread continues, and its result is dropped. Unlike a thread of ``asyncio.to_thread``, it occupies
    no slot of a pool, does not get the caller's context variables, and the process exits without waiting for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def end(result: R | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("R", result))

    def run() -> None:
        result, raised = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (fault boundary: the caller of run_in_thread gets every error)
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, result, raised)

    threading.Thread(target=run, name=getattr(function, "__name__", "blocking call"), daemon=True).start()
    return await future
