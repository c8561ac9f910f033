"""A single trainer rank of a larger world, on a phantom GPU.

Kernels compute nothing there, so the host supplies the numbers on which shapes depend: routers split rows equally among
experts, and a pipeline stage receives tensors of the shape that it would send itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from slime_like.config.schema.resolved import RankSpec
from slime_like.errors import ConfigError
from slime_like.phantom.counters import is_phantom
from slime_like.phantom.store import join_world
from slime_like.train.megatron.platform import groups, host
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util.imports import heavy_imports
from slime_like.util.ports import RendezvousAddress

LARGE = 1 << 20  # bytes of the largest copy that a phantom GPU carries out
NOWHERE = RendezvousAddress("localhost", 0)
_is_adapted = _keeps_objects = False
_hidden_shape = [0, 1, 0]  # shape of the hidden states that this rank's pipeline stage exchanges


def join(spec: RankSpec, rank: int = 0) -> RankInfo:
    """Put this process, as rank ``rank``, into a world with ``spec.layout``. It leaves any earlier world.

    The first call must precede the first import of megatron. Raises ``ConfigError`` if the process does not run on a phantom
    GPU or ``spec.device`` is not cuda, and as ``groups.check_layout`` does.
    """
    if not is_phantom() or spec.device != "cuda":
        raise ConfigError(
            "a rank can run without the other ranks of its world only on a phantom GPU: create one with slime_like.phantom"
        )
    groups.check_layout(spec.layout, spec.layout.world_size)
    import_trainer()
    leave()
    join_world(rank, spec.layout.world_size)
    info = groups.join_and_make_groups(spec, rank=rank, world_size=spec.layout.world_size, master=NOWHERE)
    adapt()
    return info


@functools.cache
def import_trainer() -> None:
    """Patch torch and megatron, then import the trainer of a rank, and torch's compiler, which a step on CUDA imports."""
    keep_objects()  # before the collectives are wrapped
    with heavy_imports():
        host.install("cuda")
        for name in ("slime_like.train.megatron.rank.trainer", "torch._inductor.compile_fx"):
            importlib.import_module(name)


def leave() -> None:
    """Leave the world, if this process is in one."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def keep_objects() -> None:
    """Replace torch's ``all_gather_object`` and ``broadcast_object_list``.

    This rank then gets only its own objects, and nothing is read from the device. Must run before the wrapper around
    collectives (``slime_like.distributed.wrapper``) is installed. Idempotent.
    """
    global _keeps_objects
    if _keeps_objects:
        return
    _keeps_objects = True
    for name, function in (("all_gather_object", _gather_own_object), ("broadcast_object_list", _keep_own_objects)):
        for module in (dist, distributed_c10d):
            setattr(module, name, function)


def adapt() -> None:
    """Patch torch, megatron and the trainer for tensors without meaningful values. Idempotent. This function imports megatron.

    Afterwards, no shape depends on a value read from the device, an optimizer step does no arithmetic on the host, and
    metrics whose checks fail are left out.
    """
    global _is_adapted
    if _is_adapted:
        return
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from slime_like.train.megatron.model.dispatch import RowDispatcher
    from slime_like.train.megatron.rank import rank_model
    from slime_like.train.megatron.step.balance import ExpertBalance
    from slime_like.train.megatron.step.step import StepReport

    _is_adapted = True
    _wrap(torch, "_fused_adamw_", _only_on_device)
    _wrap(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", _without_host_copies)
    _wrap(RowDispatcher, "_maybe_dtoh_and_synchronize", _even_rows)
    _wrap(P2PCommunicator, "_communicate_shapes", _own_shape)
    _wrap(rank_model, "make_micro", _note_shape)
    _wrap(StepReport, "metrics", _without_values)
    _wrap(ExpertBalance, "close_step", _without_values)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function ``name`` of ``owner`` with one that calls ``wrapper(stock, *args, **kwargs)``.

    ``stock`` is the original. If ``owner`` is a class, the call is ``wrapper(stock, self, *args, **kwargs)``, and ``stock``
    is the original method of ``self``.
    """
    stock = getattr(owner, name)
    if not isinstance(owner, type):
        setattr(owner, name, functools.partial(wrapper, stock))
        return

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(stock, self), self, *args, **kwargs)

    setattr(owner, name, method)


def _gather_own_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Fill ``objects`` with this rank's object, in place of those of the other ranks."""
    objects[:] = [own] * len(objects)


def _keep_own_objects(objects: list[Any], *args: Any, **kwargs: Any) -> None:
    """Leave this rank's ``objects`` as they are, instead of receiving those of the source rank."""


def _only_on_device(stock: Callable[..., Any], parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Run ``stock``, an AdamW step, only on the device: on the host it takes minutes and would allocate no new tensors."""
    if parameters[0].is_cuda:
        stock(parameters, *args, **kwargs)


class _EmptyHostCopies(TorchDispatchMode):
    """Mode in which cloning, converting or pinning a large host tensor returns an uninitialised tensor.

    No values are lost: a phantom GPU carries out no copy of this size, so the host tensor's values are already meaningless.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_copy = func in (
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
            torch.ops.aten._pin_memory.default,
        )
        if is_copy and args[0].device.type == "cpu" and args[0].nbytes > LARGE and "device" not in kwargs:
            is_pinned = func is torch.ops.aten._pin_memory.default
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"), pin_memory=is_pinned)
        return func(*args, **kwargs)


def _without_host_copies(stock: Callable[..., Any], optimizer: Any, *args: Any) -> Any:
    """Allocate the offloaded parameters, but do not copy them: the copies take seconds for a model of 30B parameters."""
    del optimizer
    with _EmptyHostCopies():
        return stock(*args)


def _even_rows(stock: Callable[..., Any], dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Replace the row counts that the host would read from the routers' choices with an equal split among ranks and experts."""
    out = stock(point, tokens_per_expert)
    rows = int(dispatcher.routing_map.shape[0]) * int(dispatcher.config.moe_router_topk)
    num_received = rows * dispatcher.tp_size
    for name, total in (("input_splits", rows), ("output_splits", rows), ("output_splits_tp", num_received)):
        value = getattr(dispatcher, name, None)
        if isinstance(value, np.ndarray):
            setattr(dispatcher, name, _even(total, value.size).reshape(value.shape))
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        return torch.from_numpy(_even(num_received, out.numel()))
    return out


def _even(total: int, parts: int) -> Any:
    sizes = np.full(parts, total // parts, np.int64)
    sizes[: total % parts] += 1
    return sizes


def _note_shape(stock: Callable[..., Any], batch: Any, rank_info: RankInfo) -> Any:
    micro = stock(batch, rank_info)
    sizes = rank_info.layout
    _hidden_shape[0] = int(micro.input_ids.shape[1]) // (sizes.tp if sizes.sequence_parallel else 1)
    return micro


def _own_shape(
    stock: Callable[..., Any], communicator: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
) -> Any:
    """Exchange shapes, but return the shape of this rank's hidden states in place of those of the previous and next stages.

    The shape is [0, 0, 0] for a stage from which nothing is received.
    """
    stock(send_next, send_prev, recv_prev, recv_next)
    shape = [_hidden_shape[0], 1, int(communicator.config.hidden_size)]
    return (shape if recv_prev else [0, 0, 0]), (shape if recv_next else [0, 0, 0])


def _without_values(stock: Callable[..., Any], owner: Any, *args: Any) -> Any:
    """Return the metrics that ``stock`` returns, or [] if a check of their values fails or a value is divided by 0.

    Values are meaningless on a phantom GPU.
    """
    del owner
    try:
        return stock(*args)
    except (AssertionError, ZeroDivisionError):
        return []
