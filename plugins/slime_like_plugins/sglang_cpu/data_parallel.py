"""Data-parallel attention on a CPU (``attn_dp_size``): ranks hold different sequences.

SGLang supports it on its own CPU engine. For an out-of-tree platform, SGLang selects Triton kernels, pinned memory and
collectives that are registered for another device. Remove when SGLang lets a platform select these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_hooks import replace_target, resolve_target, stop_on, wrap_target

SRT = "sglang.srt"
PARALLEL = f"{SRT}.distributed.parallel_state"
ATTENTION = f"{SRT}.layers.attention"
BACKENDS = ("base_attn_backend.AttentionBackend", "hybrid_linear_attn_backend.HybridLinearAttnBackend")
COLLECTIVES = ("inplace_all_reduce", "reg_all_gather_into_tensor", "reg_reduce_scatter_tensor")
ORDERED_SCATTER = "_deterministic_reduce_scatterv"
WAKE_MS = 50
"""Longest sleep of an idle engine. A request wakes only the rank that receives it, but each forward needs all ranks. Each wake-up
costs about a millisecond of computation."""


def install() -> None:
    """Call ``replace`` if the engine's attention is data-parallel."""
    if get_parallel().attn_dp_size > 1:
        replace()


def replace() -> None:
    """Replace SGLang's collectives, copies, idle sleep and attention forward in this process.

    Raises ``SystemExit`` if a name does not exist in SGLang, or if a collective is not a custom op.
    """
    collectives = {name: resolve_target(CPU, f"{PARALLEL}.{name}") for name in COLLECTIVES}
    missing = [name for name, function in collectives.items() if not hasattr(function, "__wrapped__")]
    stop_on(CPU, [f"{PARALLEL}.{name} is not a custom op" for name in missing])
    resolve_target(CPU, f"{PARALLEL}.GroupCoordinator.{ORDERED_SCATTER}")  # called by reduce_scatterv
    replace_target(CPU, f"{PARALLEL}.GroupCoordinator.reduce_scatterv", reduce_scatterv)
    exchange = f"{SRT}.layers.dp_attention"
    replace_target(CPU, f"{exchange}.memcpy_func", resolve_target(CPU, f"{exchange}.memcpy_cpu"))
    replace_target(CPU, f"{SRT}.model_executor.forward_batch_info._is_cpu", True)
    replace_target(CPU, f"{SRT}.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep", sleep)
    for backend in BACKENDS:
        wrap_target(CPU, f"{ATTENTION}.{backend}.forward", zero_when_idle)
    for name, operation in collectives.items():
        replace_target(CPU, f"{PARALLEL}.{name}", operation.__wrapped__)


def zero_when_idle(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an attention backend's ``forward`` to return zeros for the tokens that pad the batch of a rank without requests.

    SGLang leaves these rows uninitialised. The router would send them to experts together with the tokens of real requests, and
    the number of rows per expert, and with it the rounding of real results, would vary.
    """

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        result = forward(*args, **kwargs)
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[5]
        return result.zero_() if batch.forward_mode.is_idle() else result

    return wrapped


def reduce_scatterv(group: Any, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None) -> Tensor:
    """Reduce-scatter ``input_`` in parts of ``sizes`` rows (default: equal parts). Collective.

    Engines in which ``ep_size``, ``attn_dp_size`` and ``tp_size`` are equal call it. SGLang's own function needs NCCL unless its
    deterministic mode is on; here that mode's implementation is always used.
    """
    return getattr(group, ORDERED_SCATTER)(input_, output, sizes)


def sleep(self: Any) -> None:
    """On the first rank, wait up to ``WAKE_MS`` for a request; on the others, return at once.

    The other ranks wait for the first rank's next broadcast, so all wake at the same time.
    """
    if get_parallel().tp_rank == 0:
        self.poller.poll(WAKE_MS)
