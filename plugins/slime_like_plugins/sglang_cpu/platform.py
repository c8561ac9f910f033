"""The out-of-tree CPU platform, on which SGLang's ops dispatch to their torch-native forward."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from slime_like.util.scheduling import use_batch_scheduling
from slime_like_plugins.plugin_names import CPU, EXACT
from slime_like_plugins.sglang_cpu import memory
from slime_like_plugins.sglang_cpu.process import ATTENTION
from slime_like_plugins.sglang_hooks import enabled

KV_TOKENS = 65_536  # KV slots unless max_total_tokens or a rank's memory is set; SGLang would use a share of the machine's memory
MEMORY_FRACTION = 0.3
THREADS = "SLIME_LIKE_ENGINE_THREADS"
DECODE_LINE = "slime_like decodes with "  # slime_like.rollout.engine.server looks for it in the log

logger = logging.getLogger(__name__)


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """Platform for x86-64 CPUs without SGLang's kernel package."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_device(self, device_id: int = 0) -> Any:
        return "cpu"  # a string, because SGLang splits it at ':'

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def empty_cache(self) -> None:
        """Do nothing: the base class would run a full garbage collection of half a second at every flush."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the arguments that a CPU engine needs.

        SGLang calls this method while it resolves its arguments. With several ranks, the method also sets the CPU binding (if
        unset) in the environment, and the batch scheduling policy of this process. The workers inherit both. Raises
        ``SystemExit`` if speculative decoding is configured, or if the memory limit of a rank is invalid.
        """
        if server_args.speculative_algorithm is not None:
            raise SystemExit(
                f"slime_like plugin {CPU!r}: rollout.sglang.speculative_algorithm={server_args.speculative_algorithm} is not "
                "supported on a CPU: remove rollout.sglang.speculative_algorithm, or set placement.device=cuda"
            )
        if server_args.attention_backend in (None, "intel_amx"):  # intel_amx: filled in just before this hook
            server_args.attention_backend = ATTENTION
        if server_args.max_total_tokens is None and memory.limit() is None:
            server_args.max_total_tokens = KV_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEMORY_FRACTION
        server_args.sleep_on_idle = True  # otherwise an idle scheduler uses a full core
        server_args.disable_custom_all_reduce = True
        if server_args.mamba_radix_cache_strategy == "auto":
            # no_buffer caches the state at a sequence's last token, which is seldom the end of a page of dcp_size tokens.
            paged = server_args.dcp_size > 1 and has_states(server_args)
            server_args.mamba_radix_cache_strategy = "extra_buffer" if paged else "no_buffer"
        if server_args.max_mamba_cache_size is None:
            server_args.max_mamba_cache_size = state_slots(server_args)
        ranks = server_args.tp_size * server_args.pp_size
        if ranks > 1:  # one entry per rank; otherwise SGLang refuses more ranks than NUMA nodes
            cpus = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
            use_batch_scheduling()  # inherited by the schedulers

    def init_backend(self) -> None:
        """Register attention backends and the host memory allocator, and install the rotary embeddings.

        SGLang calls this method when a process imports the model runner; forked workers inherit the result. Raises the
        ``SystemExit`` of ``rotary.install``.
        """
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        from slime_like_plugins.sglang_cpu import attention_choice, rotary

        attention_choice.register()
        rotary.install()
        ALLOC_MEMORY_FUNCS["cpu"] = host_memory
        if enabled(EXACT):
            from slime_like_plugins.sglang_cpu import fixed_order_attention

            fixed_order_attention.register()

    def post_load_model(self, model: Any) -> None:
        """Set the number of threads, and replace functions and forwards of SGLang by those of this package.

        SGLang calls this method in the worker, after the fork and after it has loaded ``model`` on one thread. Raises
        ``SystemExit`` if a replaced name does not exist in SGLang, if the configured kernels are unknown or cannot be built or
        loaded, or if the machine rules out ``run.deterministic``.
        """
        import torch

        from slime_like_plugins.rollout_sampling import kernel
        from slime_like_plugins.sglang_cpu import data_parallel, expert_parallel, fused
        from slime_like_plugins.sglang_cpu.hybrid import install as hybrid
        from slime_like_plugins.sglang_cpu.selection import selected

        memory.record_model(model)
        threads = int(os.environ.get(THREADS, "1"))
        torch.set_num_threads(threads)
        if enabled(EXACT):
            from slime_like_plugins.sglang_cpu import batch_invariant_hooks

            batch_invariant_hooks.check(model)
        data_parallel.install()
        expert_parallel.install()
        linear_attention = hybrid.bind(model)
        selection = selected()
        description = fused.bind(model, selection.leaf)
        if linear_attention is not None:
            description = f"{description}; {linear_attention}"
        if selection.leaf is not None:
            os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"  # only captured graphs need the copy
        kernel.select(selection.c.sample if selection.c else None)
        logger.info("%s%s; %s; threads: %d", DECODE_LINE, selection.text, description, threads)


def host_memory(dims: tuple[int, ...], dtype: Any, device: str, *args: Any, **kwargs: Any) -> Any:
    """Return uninitialised memory for a host pool, such as the pool of cached tokens' expert ids.

    SGLang's own function would register the memory with CUDA.
    """
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def state_slots(server_args: Any) -> int | None:
    """Return the number of linear attention states to allocate.

    The result is None if the model has no such states, or if SGLang should choose the number.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    from slime_like_plugins.sglang_cpu.hybrid.states import slots

    return slots(model_config_of(server_args).hf_text_config, server_args.max_running_requests)


def has_states(server_args: Any) -> bool:
    """Return True if the model has linear attention states."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from slime_like_plugins.sglang_cpu.hybrid.states import state_bytes

    return state_bytes(model_config_of(server_args).hf_text_config) > 0
