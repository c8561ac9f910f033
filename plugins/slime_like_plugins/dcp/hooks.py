"""Hooks that allow DCP groups on a CPU, measure the exchanges of a group, and stop an engine that cannot serve with DCP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from slime_like.config.schema.dcp import (
    SHARDED_FLASHINFER,
    UNSUPPORTED_FIELDS,
    backend_obstacle,
    field_obstacle,
    kv_head_obstacle,
    replicated_q_obstacle,
)
from slime_like_plugins.dcp import exchange_time
from slime_like_plugins.plugin_names import CPU, DCP
from slime_like_plugins.sglang_cpu import sharded
from slime_like_plugins.sglang_hooks import Hook, enabled, fix_of, resolve_target
from slime_like_plugins.sglang_hooks import install as install_hooks

OFF = "set rollout.dcp=1 (--dcp-size)"


def create_groups(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around ``initialize_model_parallel``: allow DCP groups on a CPU, and measure their exchanges.

    ``is_cuda`` returns True during the call: the function uses it only to reject platforms on which SGLang's own attention
    does not support DCP. Raises ``SystemExit`` if the function's module has no ``is_cuda``. Remove when SGLang's platforms
    declare whether they support DCP.
    """
    from sglang.srt.distributed import parallel_state

    module: Any = parallel_state
    is_cuda = resolve_target(DCP, f"{module.__name__}.is_cuda")
    module.is_cuda = lambda: True
    try:
        result = original(*args, **kwargs)
    finally:
        module.is_cuda = is_cuda
    measure_exchanges(result)
    return result


def measure_exchanges(result: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after ``initialize_model_parallel``: measure the exchanges of this rank's DCP group, if it has one.

    A group on a CPU also gets an all-to-all that runs there. Remove when SGLang reports the time of its collectives.
    """
    from sglang.srt.distributed import parallel_state

    module: Any = parallel_state
    group = module._DCP
    if group is None:
        return
    if group.device.type == "cpu":
        group.all_to_all_single = functools.partial(_all_to_all_on_cpu, group.device_group)
        exchange_time.measure(group, exchange_time.HostClock())
    else:
        exchange_time.measure(group, exchange_time.DeviceClock(torch.cuda))


def _all_to_all_on_cpu(process_group: Any, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
    """Exchange equal parts between the ranks of a group on a CPU. Collective. SGLang's own operator needs a GPU."""
    torch.distributed.all_to_all_single(outputs, inputs, group=process_group)


def check_resolved(result: None, server_args: Any) -> None:
    """Hook after ``ServerArgs.resolve_once``: stop the engine (``SystemExit``) if ``obstacle`` finds a reason.

    Remove when SGLang rejects attention backends that do not support DCP, and KV heads that differ within a DCP group.
    """
    if problem := obstacle(server_args):
        raise SystemExit(f"slime_like plugin {DCP!r}: rollout.dcp: {problem}")


def obstacle(server_args: Any) -> str | None:
    """Return the reason why an engine with resolved ``server_args`` cannot serve with its ``dcp_size``; None if it can."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
    from sglang.srt.configs.model_config import AttentionArch

    view = resolved_view(server_args)
    dcp = int(view.dcp_size)
    if dcp == 1:
        return None
    config = model_config_of(server_args)
    latent = config.attention_arch == AttentionArch.MLA
    for backend in dict.fromkeys(attention_backends_of(view)):
        if reason := backend_obstacle(backend, "cpu" if view.device == "cpu" else "cuda", latent=latent):
            return (
                f"SGLang resolved the attention backend {backend!r}, which cannot serve with dcp_size={dcp}: {reason}"
            )
    for field in UNSUPPORTED_FIELDS:
        value = getattr(view, field)
        if reason := field_obstacle(field, value):
            fix = fix_of(field, UNSUPPORTED_FIELDS[field][0])
            return f"SGLang resolved {field}={value!r}, which is not allowed with dcp_size={dcp}: {reason}; {fix}, or {OFF}"
    if view.dcp_replicate_q_proj and (
        reason := replicated_q_obstacle(view.device, view.dcp_comm_backend, latent=latent)
    ):
        return f"SGLang resolved dcp_replicate_q_proj=True, which is not allowed here: {reason}; set rollout.dcp_replicate_q=false"
    if config.is_hybrid_swa:
        return f"dcp_size={dcp} for a model with sliding windows, whose KV cache SGLang does not shard; {OFF}"
    ranks = int(view.tp_size) // int(view.attn_dp_size or 1)
    return kv_head_obstacle(ranks, dcp, 1 if latent else int(config.get_total_num_kv_heads()))


INITIALIZE = "sglang.srt.distributed.parallel_state.initialize_model_parallel"
GROUPS = Hook(INITIALIZE, "around", create_groups)
TIMES = Hook(INITIALIZE, "after", measure_exchanges)
CHECK = Hook("sglang.srt.server_args.ServerArgs.resolve_once", "after", check_resolved)


def install() -> None:
    """Apply the hooks in this process, and register the attention backends of its device."""
    if enabled(CPU):
        sharded.provide(sharded_backend)
        install_hooks(DCP, (GROUPS, CHECK))
        return
    register_flashinfer()
    install_hooks(DCP, (CHECK, TIMES))


def sharded_backend(latent: bool) -> sharded.BackendFactory:
    """Return the class of the attention backend on a CPU: over latents if ``latent``, else over keys and values.

    The class is imported only when it is needed, as SGLang imports its own backends.
    """
    if latent:
        from slime_like_plugins.dcp.latent_attention import ShardedLatentAttention

        return ShardedLatentAttention
    from slime_like_plugins.dcp.attention import ShardedAttention

    return ShardedAttention


def register_flashinfer() -> None:
    """Register the backend ``flashinfer_dcp``. Its module is imported when SGLang creates it, after choosing a device."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    def create(runner: Any) -> Any:
        from slime_like_plugins.dcp.flashinfer_attention import ShardedFlashInfer

        return ShardedFlashInfer(runner)

    choices.add_attention_backend_choices([SHARDED_FLASHINFER])
    attention_registry.register_attention_backend(SHARDED_FLASHINFER)(create)
    attention_registry.HYBRID_GDN_SM100_BACKENDS.add(SHARDED_FLASHINFER)  # SGLang allows these for hybrids on Blackwell
