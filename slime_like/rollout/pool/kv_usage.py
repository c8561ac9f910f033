"""Metrics of the engines' KV caches, queried once per rollout. The engines count at every batch, so no peak is missed."""

from __future__ import annotations

import asyncio

from slime_like.errors import DeadlineExceeded, EngineError
from slime_like.metrics.types import Last, Metric, Sum
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.replies import KvUsage
from slime_like.rollout.pool.engine_pool import EnginePool


async def kv_metrics(pool: EnginePool) -> list[Metric]:
    """Return the use of all engines' KV caches since the last call; no metrics if no engine responds.

    An engine that restarts loses its counts, and an engine that does not respond within ``health.timeout_s`` is left to the
    health checks.
    """
    replies = await asyncio.gather(*(_usage(engine, pool.health.timeout_s) for engine in pool.router.engines))
    usages = [usage for usage in replies if usage is not None]
    if not usages:
        return []
    return [
        Last("rollout/kv_capacity_tokens", min(usage.capacity_tokens for usage in usages)),
        Last("rollout/kv_usage", max(usage.share for usage in usages)),
        Last("rollout/running_requests_max", max(usage.running_requests_max for usage in usages)),
        Sum("rollout/retractions", sum(usage.retractions for usage in usages)),
    ]


async def _usage(engine: EngineClient, timeout_s: float) -> KvUsage | None:
    try:
        return await engine.kv_usage(timeout_s)
    except (EngineError, DeadlineExceeded):
        return None
