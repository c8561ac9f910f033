"""Faults that tests of ranks plant in the trainer, by name: under each a comparison must turn red."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Generator[None]:
    """``target.name = value`` for a while."""
    stock = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, stock)


def skipped_tp_reduction() -> Any:
    """The hidden states' gradient is not summed over the tensor parallel ranks, which hold parts of the vocabulary."""
    from slime_like.train.megatron.model import model

    stock = model.gather_from_sequence_parallel_region
    return replaced(
        model, "gather_from_sequence_parallel_region", lambda x, **_: stock(x, tensor_parallel_output_grad=False)
    )


def shifted_positions() -> Any:
    """Every token gets its neighbour's position (a constant shift would change nothing: RoPE is relative)."""
    from slime_like.train.megatron.model import forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        return dataclasses.replace(layout, position_ids=np.roll(layout.position_ids, 1))

    stock = forward.token_layout
    return replaced(forward, "token_layout", shifted)


def denominator_per_micro_batch() -> Any:
    """Each micro-batch's loss is divided by its own weight."""
    from slime_like.train.megatron.step.step import PolicyStep

    def averaged(self: Any, micro: Any, *args: Any) -> Any:
        loss, count = stock(self, micro, *args)
        return loss / float(micro.rows.loss_weight.sum()) / 4, count

    stock = PolicyStep._loss_of
    return replaced(PolicyStep, "_loss_of", averaged)


def shuffled_biases() -> Any:
    """Query, key and value biases are stacked as three matrices instead of by query group."""
    from slime_like.train.megatron.families import base

    def split(self: Any, tensors: Any, tp: int, rank: int) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat([t.chunk(tp, 0)[rank] for t in tensors], 0)
        return stock(self, tensors, tp, rank)

    stock = base.QKV.split
    return replaced(base.QKV, "split", split)


def swapped_chunks() -> Any:
    """Under context parallelism a rank holds its two chunks of each sequence in the wrong order."""
    from slime_like.train.megatron.model import forward

    def swapped(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        halves = np.diff(layout.padded_cu_seqlens) // kwargs["cp"] // 2
        starts = np.cumsum(2 * halves) - 2 * halves
        order = np.concatenate([np.roll(np.arange(s, s + 2 * h), h) for s, h in zip(starts, halves, strict=True)])
        return dataclasses.replace(layout, row_index=layout.row_index[order], next_index=layout.next_index[order])

    stock = forward.token_layout
    return replaced(forward, "token_layout", swapped)


def dropped_norm_reduction() -> Any:
    """Under sequence parallelism the norms' gradients stay those of each rank's own tokens."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function shadows its name
    return replaced(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None)


def columns_of_one_rank() -> Any:
    """Under context parallelism scores are those of each rank's own part of the sequences."""
    from slime_like.train.megatron.model import forward

    return replaced(forward, "sum_columns", lambda columns, group: list(columns))


def swapped_experts() -> Any:
    """Each of two expert parallel ranks is given the other's experts."""
    from slime_like.train.megatron.model import model

    stock = model.global_key
    return replaced(model, "global_key", lambda key, num_local, ep_rank: stock(key, num_local, 1 - ep_rank))


def unnormalised_router() -> Any:
    """The weights of a token's experts are their share among all experts."""
    from slime_like.train.megatron.families.experts import Experts

    return replaced(Experts, "renormalises", False)


def unreduced_experts() -> Any:
    """Gradients of experts stay those of each copy's own tokens."""
    from megatron.core.distributed import DistributedDataParallel

    stock: Any = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for group in self.expert_parallel_bucket_groups:
            group.start_grad_sync = group.finish_grad_sync = lambda **_: None

    return replaced(DistributedDataParallel, "__init__", init)


def balance_per_trained_token() -> Any:
    """The auxiliary loss is divided by the trained tokens, as the others, though it is a sum over all."""
    from slime_like.train.megatron.step import balance

    return replaced(balance.ExpertBalance, "open_step", lambda *_: None)


def unsummed_head_norm() -> Any:
    """The norm of Gated DeltaNet's heads keeps the gradient of each tensor parallel rank's own heads, as in megatron-core."""
    from slime_like.train.megatron.model import norms

    return replaced(norms, "copy_to_tensor_model_parallel_region", lambda weight: weight)


def unordered_ranks() -> Any:
    """Under context parallelism Gated DeltaNet takes tokens in the order of the ranks that hold them."""
    from slime_like.train.megatron.model import forward

    return replaced(forward, "tokens_by_rank", lambda bounds, cp: np.arange(bounds[-1]))


def convolution_across_borders() -> Any:
    """The short convolution takes all packed sequences for one."""
    from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

    stock = TorchGDN.causal_conv

    def across(self: Any, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        return stock(self, x, weight, **{**kwargs, "cu_seqlens_cpu": kwargs["cu_seqlens_cpu"][[0, -1]]})

    return replaced(TorchGDN, "causal_conv", across)


def gradient_of_own_range() -> Any:
    """Where states are passed on, backward keeps what a rank's own tokens say of them, as if no other rank had read any."""
    from slime_like_plugins.qwen_gdn import ranges

    return replaced(ranges, "gather_from_sequence_parallel_region", _Kept.of)


class _Kept(torch.autograd.Function):
    @staticmethod
    def of(local: Tensor, group: Any) -> Tensor:
        return _Kept.apply(local, group)

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.rank = dist.get_rank(group)
        out = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, local.contiguous(), group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank : ctx.rank + 1], None


FAULTS: dict[str, Callable[[], Any]] = {
    "gradient_of_own_range": gradient_of_own_range,
    "swapped_experts": swapped_experts,
    "unnormalised_router": unnormalised_router,
    "unreduced_experts": unreduced_experts,
    "balance_per_trained_token": balance_per_trained_token,
    "swapped_chunks": swapped_chunks,
    "dropped_norm_reduction": dropped_norm_reduction,
    "columns_of_one_rank": columns_of_one_rank,
    "skipped_tp_reduction": skipped_tp_reduction,
    "shifted_positions": shifted_positions,
    "denominator_per_micro_batch": denominator_per_micro_batch,
    "shuffled_biases": shuffled_biases,
    "unsummed_head_norm": unsummed_head_norm,
    "unordered_ranks": unordered_ranks,
    "convolution_across_borders": convolution_across_borders,
}
