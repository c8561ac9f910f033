"""Metrics of the engines' KV caches, queried once per rollout. Engines update them at every batch, so no peak is missed."""

from __future__ import annotations

import asyncio

from slime_like.errors import DeadlineExceeded, EngineError
from slime_like.metrics.types import Max, Metric, Min, Sum
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.connection import KvUsage
from slime_like.rollout.pool.engine_pool import EnginePool


async def kv_metrics(pool: EnginePool) -> tuple[list[Metric], list[str]]:
    """Return metrics of KV cache usage since the last call, and a warning for each engine that sent no report.

    An engine that serves no requests is not queried, and one that does not respond within ``health.timeout_s`` is left
    to the health checks. The metrics cover the other engines; ``rollout/kv_engines_without_report`` counts the engines
    that sent no report.
    """
    replies = await asyncio.gather(*(_usage(pool, slot.client) for slot in pool.slots))
    usages = [reply for reply in replies if isinstance(reply, KvUsage)]
    warnings = [f"the metrics of the KV cache lack {reply}" for reply in replies if isinstance(reply, str)]
    metrics: list[Metric] = [Sum("rollout/kv_engines_without_report", len(warnings))]
    if not usages:
        return metrics, warnings
    metrics += [
        Min("rollout/kv_capacity_tokens", min(usage.capacity_tokens for usage in usages)),
        Max("rollout/kv_usage", max(usage.share for usage in usages)),
        Max("rollout/running_requests_max", max(usage.running_requests_max for usage in usages)),
        Sum("rollout/retractions", sum(usage.retractions for usage in usages)),
    ]
    exchanges = [usage.dcp_exchange_s for usage in usages if usage.dcp_exchange_s is not None]
    if exchanges:
        metrics.append(Max("rollout/dcp_exchange_time", max(exchanges)))
    return metrics, warnings


async def _usage(pool: EnginePool, engine: EngineClient) -> KvUsage | str:
    """Return the report of an engine, or its name with the reason why there is none."""
    if engine not in pool.router.engines:
        states = "lost, stalled or waiting for the next push" if pool.receives_pushes else "lost or stalled"
        return f"{engine.name} (it serves no requests: {states})"
    try:
        return await engine.kv_usage(pool.health.timeout_s)
    except (EngineError, DeadlineExceeded) as error:
        return f"{engine.name} ({str(error).splitlines()[0]})"
