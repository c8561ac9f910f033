"""Number of concurrent requests of an engine: the load from a rollout, and the limit ``rollout.max_running_requests``."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.schema.rollout import AUTO, RolloutConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.planner.engine import EngineMemory

KV_CACHE, STATES = "the KV cache", "recurrent states"
"""Factors that limit the concurrent requests of an engine."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests that a rollout sends to one engine."""

    num_samples: int  # samples that a rollout starts on the engine at the same time
    sequence_len: int  # maximum tokens of one request, prompt and response
    max_running: int | None = None  # rollout.max_running_requests, if it is a number

    @property
    def num_requests(self) -> int:
        """Number of requests that the engine would run at the same time if its KV cache held them."""
        return self.num_samples if self.max_running is None else min(self.num_samples, self.max_running)

    def limit_on(self, engine: EngineMemory) -> str:
        """Return the factor that limits the concurrent requests of an engine with this memory, e.g. ``KV_CACHE``."""
        num_fitting = engine.requests(self.sequence_len)
        if self.max_running is not None and self.max_running <= min(num_fitting, self.num_samples):
            return "rollout.max_running_requests"
        if num_fitting >= self.num_samples:
            return "the rollout's size"
        return STATES if engine.slot_bytes and num_fitting == engine.groups * engine.state_requests else KV_CACHE


def engine_load(cfg: TrainConfig, context: int) -> EngineLoad:
    """Return the load of one engine.

    If ``data.max_prompt_len`` is unset, prompt and response may fill the ``context``.
    """
    rollout = cfg.rollout
    groups = max(rollout.batch_size, rollout.over_sampling_batch_size or 0)
    prompt = cfg.data.max_prompt_len or max(0, context - rollout.max_response_len)
    return EngineLoad(
        num_samples=-(-groups * rollout.n_samples_per_prompt // rollout.num_engines),
        sequence_len=min(context, rollout.max_response_len + prompt),
        max_running=fixed_limit(rollout),
    )


def fixed_limit(rollout: RolloutConfig) -> int | None:
    """Return the fixed limit of concurrent requests of an engine; None if SGLang or the free KV cache limits them."""
    limit = rollout.max_running_requests
    return None if limit is None or limit == AUTO else int(limit)


def add_admission_decision(
    rollout: RolloutConfig, dcp: int, predicted: EngineMemory | None, decisions: PlanDecisions
) -> None:
    """Record how ``rollout.max_running_requests=auto`` is resolved for engines with ``predicted`` memory.

    Do nothing for other values. ``dcp`` ranks share the KV cache of a sequence. Raises ``ConfigError`` if the configured KV
    cache cannot hold one response, because SGLang would truncate the response.
    """
    if rollout.max_running_requests != AUTO:
        return
    length, source = rollout.max_response_len, "rollout.sglang.max_total_tokens"
    token_limit = rollout.sglang.get("max_total_tokens")
    capacity = token_limit * dcp if isinstance(token_limit, int) else None
    if capacity is not None and capacity <= length:
        raise ConfigError(
            f"rollout.sglang.max_total_tokens={token_limit} does not hold one response of rollout.max_response_len={length}: "
            "SGLang would truncate the response; raise rollout.sglang.max_total_tokens, or lower rollout.max_response_len"
        )
    if capacity is None and predicted is not None:
        capacity, source = predicted.tokens, "predicted"
    cache = "the KV cache" if capacity is None else f"the KV cache of {capacity} tokens ({source})"
    max_text = "" if capacity is None else f", at most {capacity // length}"
    reason = f"requests run while {cache} holds prompts and responses: {length} tokens each{max_text}, until lengths are observed"
    decisions.add("rollout.max_running_requests", "by free KV cache", reason)
