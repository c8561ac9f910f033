"""Agents that never call their model, to test running, ending and counting without an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

labels: list[Any] = []
finished: list[asyncio.Event] = []  # one event, set up by the running test


async def idle(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> float:
    """Return without calling the model."""
    return 1.0


async def raises(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Raise an error."""
    raise LookupError("lost")


async def cancels(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Wait for a cancelled task."""
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def leaves(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Call ``sys.exit``."""
    sys.exit(3)


async def leaves_in_a_task(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Call ``sys.exit`` in a task."""
    await asyncio.create_task(leaves(base_url, api_key, prompt, metadata))


async def writes(base_url: str, api_key: str, prompt: Any, metadata: Any) -> None:
    """Modify the arguments."""
    labels.append(metadata["label"])
    prompt[0]["content"].append("more")
    metadata["tools"].append("more")


async def takes_turns(base_url: str, api_key: str, prompt: Any, metadata: Mapping[str, Any]) -> None:
    """Wait until an evaluation has run."""
    if prompt == "eval":
        finished[0].set()
    await finished[0].wait()
