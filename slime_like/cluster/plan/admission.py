"""Resolves ``rollout.max_running_requests``: a number for SGLang, or admission by the free KV cache."""

from __future__ import annotations

from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.schema.rollout import AUTO, RolloutConfig
from slime_like.errors import ConfigError
from slime_like.planner.engine import EngineMemory


def fixed_limit(rollout: RolloutConfig) -> int | None:
    """Return the fixed number of concurrent requests of an engine; None if SGLang or the free KV cache decides.

    Raises ``ConfigError`` if a configured KV cache cannot hold one response, which SGLang would shorten.
    """
    limit = rollout.max_running_requests
    if limit != AUTO:
        return None if limit is None else int(limit)
    capacity, length = _configured_tokens(rollout), rollout.max_response_len
    if capacity is not None and capacity <= length:
        raise ConfigError(
            f"rollout.sglang.max_total_tokens={rollout.sglang['max_total_tokens']} does not hold one response of "
            f"rollout.max_response_len={length}, which SGLang would shorten: raise the former, or lower the latter"
        )
    return None


def add_admission_decision(rollout: RolloutConfig, predicted: EngineMemory | None, decisions: PlanDecisions) -> None:
    """Record what ``rollout.max_running_requests=auto`` means for engines with ``predicted`` memory, if it is set."""
    if rollout.max_running_requests != AUTO:
        return
    length, capacity, source = rollout.max_response_len, _configured_tokens(rollout), "rollout.sglang.max_total_tokens"
    if capacity is None and predicted is not None:
        capacity, source = predicted.tokens, "predicted"
    cache = "the KV cache" if capacity is None else f"the KV cache of {capacity} tokens ({source})"
    count = "" if capacity is None else f", at most {capacity // length}"
    reason = f"requests run while {cache} holds prompts and responses: {length} tokens each{count}, until lengths are observed"
    decisions.add("rollout.max_running_requests", "by free KV cache", reason)


def _configured_tokens(rollout: RolloutConfig) -> int | None:
    """Return the tokens of an engine's KV cache, if ``rollout.sglang`` sets them for a rank."""
    tokens = rollout.sglang.get("max_total_tokens")
    return tokens * rollout.dcp if isinstance(tokens, int) else None
