"""Agents that never ask their model: how one is run, ended and counted, without an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

heard: list[Any] = []
finished: list[asyncio.Event] = []  # one, of the test that runs


async def idle(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> float:
    """Talks to somebody else."""
    return 1.0


async def raises(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """A fault of its own."""
    raise LookupError("lost")


async def cancels(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Waits for a task that was cancelled."""
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def leaves(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Ends its process, as it thinks."""
    sys.exit(3)


async def leaves_in_a_task(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """The same, further down."""
    await asyncio.create_task(leaves(base_url, api_key, prompt, metadata))


async def writes(base_url: str, api_key: str, prompt: Any, metadata: Any) -> None:
    """Changes what it was given."""
    heard.append(metadata["label"])
    prompt[0]["content"].append("more")
    metadata["tools"].append("more")


async def takes_turns(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """In training it goes on once an evaluation has ended."""
    if prompt == "eval":
        finished[0].set()
    await finished[0].wait()
