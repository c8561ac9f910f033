"""Patches of megatron-core and of torch's optimizers for a machine without a GPU, in addition to ``cpu_torch``."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from slime_like.train.megatron.platform import patches


def _rng(module: types.ModuleType) -> None:
    """Read and set the CPU's RNG state: upstream reads states through torch.cuda.random and sets those of CUDA generators."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    patches.replace(module, "_get_cuda_rng_state", get_state)
    patches.replace(module, "_set_cuda_rng_state", set_state)
    logging.getLogger(module.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _clip(module: types.ModuleType) -> None:
    """Replace gradient clipping: upstream asserts that gradients are of type torch.cuda.FloatTensor."""

    def clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
        coefficient = max_norm / (total_norm + 1.0e-6)
        all_grads = [getattr(p, "decoupled_grad", None) if use_decoupled_grad else p.grad for p in parameters]
        grads = [grad for grad in all_grads if grad is not None]
        if coefficient < 1.0 and grads:
            torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateUsage]  no public function multiplies a list at once

    patches.replace(module, "clip_grad_by_total_norm_fp32", clip)


def _split_sizes(module: types.ModuleType) -> None:
    """Convert split sizes of the expert all-to-all to numpy: upstream does so only when it copies them from a GPU."""
    stock: Callable[..., Any] = module.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        on_host = stock(tensor, as_numpy, record_stream)
        return on_host.numpy() if as_numpy and isinstance(on_host, torch.Tensor) else on_host

    patches.replace(module, "maybe_move_tensor_to_cpu", to_host)


def _groups_of_one(module: types.ModuleType) -> None:
    """Skip in-place collectives of the distributed optimizer in a group of one rank, where gloo would copy each buffer twice.

    Remove when megatron-core skips them.
    """
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        patches.replace(module, name, _skip_if_alone(getattr(module, name)))


def _skip_if_alone(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchange_unless_alone(
        output: torch.Tensor, source: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        same_buffer = output.data_ptr() == source.data_ptr() and output.numel() == source.numel()
        if same_buffer and group is not None and group.size() == 1:
            return None
        return exchange(output, source, *args, group=group, **kwargs)

    return exchange_unless_alone


def without_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes 0.8 s of CPU time and 110 MiB on each rank.

    They import it to exclude their methods from compilation; ``host`` compiles nothing on a CPU. Remove when torch
    imports it only to compile.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method: Any = getattr(torch.optim.Optimizer, name)
        assert inspect.getclosurevars(method).nonlocals.get("fn") is method.__wrapped__, (
            f"torch changed Optimizer.{name}: check whether it still imports torch._dynamo"
        )
        setattr(method.__wrapped__, "__dynamo_disable", method.__wrapped__)


PATCHES: dict[str, patches.Patch] = {
    "megatron.core.distributed.param_and_grad_buffer": _groups_of_one,
    "megatron.core.transformer.moe.moe_utils": _split_sizes,
    "megatron.core.tensor_parallel.random": _rng,
    "megatron.core.optimizer.clip_grads": _clip,
}
"""Module name -> patch."""
