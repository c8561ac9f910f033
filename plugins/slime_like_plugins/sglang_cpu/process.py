"""Hooks into SGLang's processes, mainly to fork workers and to make idle and paused engines wait without spinning."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from slime_like.distributed.gloo_device import share_gloo_device
from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_cpu import results
from slime_like_plugins.sglang_hooks import Hook, wrap_target
from slime_like_plugins.sglang_hooks import install as install_hooks

ATTENTION = "slime_like_cpu"
RECEIVE = "sglang.srt.managers.data_parallel_controller.sock_recv"
WAIT_MS = 1_000  # maximum wait for a message, after which the controller feeds its watchdog


def start_by_fork(result: None, *_: Any, **__: Any) -> None:
    """Hook after ``_set_envs_and_config``: fork workers if ``OMP_NUM_THREADS`` is 1, so that SGLang is imported only once.

    Forking is safe only because the process has one OpenMP thread and no CUDA, and runs nothing but an engine. Remove when
    SGLang accepts a start method as an argument.
    """
    if os.environ.get("OMP_NUM_THREADS") == "1":
        multiprocessing.set_start_method("fork", force=True)


def sleep_while_paused(result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook after each iteration of a paused scheduler's loop: wait for a message, as an idle scheduler does.

    Otherwise the scheduler spins. Remove when SGLang's ``sleep_on_idle`` covers the paused state.
    """
    scheduler.maybe_sleep_on_idle()


def receive(original: Callable[..., Any], socket: Any, **options: Any) -> Any:
    """Call ``sock_recv`` of SGLang's data-parallel controller after a wait of up to ``WAIT_MS`` for a message.

    Without the wait, the controller spins on a core. This is not a hook, because a hook would apply in all of SGLang's
    processes. Remove when SGLang's ``sleep_on_idle`` covers the controller of data-parallel attention.
    """
    socket.poll(WAIT_MS)
    return original(socket, **options)


def unpadded_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Return ``model_config`` unchanged.

    This function replaces ``adjust_config_with_unaligned_cpu_tp``, which pads heads for AMX kernels on any CPU and so breaks
    KV heads that are replicated over ranks. Remove when padding is an option of SGLang's platforms.
    """
    return model_config


def device_module(original: Callable[..., Any], device: Any = None) -> Any:
    """Hook around ``torch.get_device_module``: return the CPU's module if no device is given.

    A torch built for CUDA returns ``torch.cuda`` on machines without CUDA, and SGLang's Qwen3-Next gets the current
    device from it. Remove when SGLang uses its platform, or torch checks the available devices.
    """
    return original("cpu" if device is None else device)


HOOKS = (
    Hook("torch.get_device_module", "around", device_module),
    Hook("sglang.srt.entrypoints.engine._set_envs_and_config", "after", start_by_fork),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine", "after", sleep_while_paused
    ),
    Hook("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", "replace", unpadded_config),
    results.HOOK,
)


def install() -> None:
    """Register the attention backend's name, install the hooks and ``receive``, and share a gloo device between groups.

    Raises ``SystemExit`` if a hooked or replaced function does not exist.
    """
    from sglang.srt.arg_groups import choices

    choices.add_attention_backend_choices([ATTENTION])
    install_hooks(CPU, HOOKS)
    wrap_target(CPU, RECEIVE, lambda original: functools.partial(receive, original))
    share_gloo_device()
