"""Hooks that record the use of the KV cache in SGLang's scheduler and report it through ``/server_info``.

SGLang itself reports only snapshots of the load (``/v1/loads``), and its per-request retraction count includes retractions
caused by weight pushes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from slime_like_plugins.dcp import exchange_time
from slime_like_plugins.plugin_names import KV_USAGE
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

STATE = "slime_like_kv"
"""Key of the counts in a scheduler's internal state."""


@dataclass(slots=True)
class Counts:
    """Counts of this process's scheduler since the last report."""

    capacity_tokens: int = 0
    used_tokens_max: int = 0  # by running requests; cached prefixes that may be evicted do not count
    running_requests_max: int = 0
    retractions: int = 0
    decode_steps: int = 0
    graph_replays: int = 0  # decode steps that replayed a CUDA graph

    def report(self) -> dict[str, float]:
        """Return the counts except ``graph_replays``, and reset all but the capacity.

        If the engine has decode context parallelism (DCP), the result includes the time of its exchanges.
        """
        values: dict[str, float] = asdict(self)
        del values["graph_replays"]
        if (seconds := exchange_time.take(self.graph_replays)) is not None:
            values["dcp_exchange_s"] = seconds
        self.used_tokens_max = self.running_requests_max = self.retractions = self.decode_steps = self.graph_replays = 0
        return values


counts = Counts()


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``Scheduler.run_batch``: record the use of the cache, and count decode steps and graph replays.

    The use of the cache peaks once ``batch`` has its slots.
    """
    stats = scheduler.pool_stats_observer.get_pool_stats()
    used_tokens, _ = stats.get_kv_token_stats()
    counts.capacity_tokens = stats.full_capacity
    counts.used_tokens_max = max(counts.used_tokens_max, used_tokens)
    if batch.forward_mode.is_decode():
        counts.running_requests_max = max(counts.running_requests_max, batch.batch_size())
        counts.decode_steps += 1
    result = original(scheduler, batch, *args, **kwargs)
    if batch.forward_mode.is_decode():
        counts.graph_replays += bool(getattr(result, "can_run_cuda_graph", False))
    return result


def retract_decode(result: tuple[Any, ...], batch: Any) -> None:
    """Hook after ``ScheduleBatch.retract_decode``: count requests that lose their KV cache for lack of memory."""
    retracted, _, aborted = result
    counts.retractions += len(retracted) + len(aborted)


def internal_state(output: Any, controller: Any, request: Any) -> None:
    """Hook after ``SchedulerInternalStateController.get_internal_state``: add to its output the counts since the last call."""
    counts.capacity_tokens = controller.scheduler.pool_stats_observer.get_pool_stats().full_capacity
    output.internal_state[STATE] = counts.report()


HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler.run_batch", "around", run_batch),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", "after", retract_decode),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "after",
        internal_state,
    ),
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks(KV_USAGE, HOOKS)
