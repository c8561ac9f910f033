"""Faults that rank tests inject into the trainer. Each must be detected by a comparison."""

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
def replace_attribute(target: Any, name: str, value: Any) -> Generator[None]:
    """Set ``target.name`` until exit."""
    stock = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, stock)


def skipped_tp_reduction() -> Any:
    """Skip the sum of the hidden states' gradient over tp ranks, each of which has a part of the vocabulary."""
    from slime_like.train.megatron.model import model

    stock = model.gather_from_sequence_parallel_region
    return replace_attribute(
        model, "gather_from_sequence_parallel_region", lambda x, **_: stock(x, tensor_parallel_output_grad=False)
    )


def shifted_positions() -> Any:
    """Give every token its neighbour's position. (RoPE is relative, so a constant shift would have no effect.)"""
    from slime_like.train.megatron.model import forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        return dataclasses.replace(layout, position_ids=np.roll(layout.position_ids, 1))

    stock = forward.token_layout
    return replace_attribute(forward, "token_layout", shifted)


def denominator_per_micro_batch() -> Any:
    """Divide the loss of each micro-batch by the weight of the micro-batch."""
    from slime_like.train.megatron.step.step import PolicyStep

    def averaged(self: Any, micro: Any, *args: Any) -> Any:
        loss, count = stock(self, micro, *args)
        return loss / float(micro.batch.loss_weight.sum()) / 4, count

    stock = PolicyStep._loss_of
    return replace_attribute(PolicyStep, "_loss_of", averaged)


def shuffled_biases() -> Any:
    """Stack query, key and value biases as three matrices instead of by query group."""
    from slime_like.train.megatron.families import base

    def split(self: Any, tensors: Any, tp: int, rank: int) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat([t.chunk(tp, 0)[rank] for t in tensors], 0)
        return stock(self, tensors, tp, rank)

    stock = base.QKV.split
    return replace_attribute(base.QKV, "split", split)


def swapped_chunks() -> Any:
    """Swap the two chunks of each sequence on a context parallel rank."""
    from slime_like.train.megatron.model import forward

    def swapped(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        halves = np.diff(layout.padded_cu_seqlens) // kwargs["cp"] // 2
        starts = np.cumsum(2 * halves) - 2 * halves
        order = np.concatenate([np.roll(np.arange(s, s + 2 * h), h) for s, h in zip(starts, halves, strict=True)])
        return dataclasses.replace(layout, token_index=layout.token_index[order], next_index=layout.next_index[order])

    stock = forward.token_layout
    return replace_attribute(forward, "token_layout", swapped)


def dropped_norm_reduction() -> Any:
    """Skip the sum of norm gradients over the ranks of sequence parallelism."""
    module = importlib.import_module(
        "megatron.core.distributed.finalize_model_grads"
    )  # a function of the package has the same name
    return replace_attribute(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None)


def columns_of_one_rank() -> Any:
    """Skip the sum of score columns over the context parallel ranks."""
    from slime_like.train.megatron.model import forward

    return replace_attribute(forward, "sum_columns", lambda columns, group: list(columns))


def swapped_experts() -> Any:
    """Swap the experts of two expert parallel ranks."""
    from slime_like.train.megatron.model import model

    stock = model.global_key
    return replace_attribute(model, "global_key", lambda key, num_local, ep_rank: stock(key, num_local, 1 - ep_rank))


def unnormalised_router() -> Any:
    """Do not renormalise the weights of a token's experts."""
    from slime_like.train.megatron.families.experts import Experts

    return replace_attribute(Experts, "renormalises", False)


def unreduced_experts() -> Any:
    """Skip the reduction of expert gradients over the copies of an expert."""
    from megatron.core.distributed import DistributedDataParallel

    stock: Any = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for group in self.expert_parallel_bucket_groups:
            group.start_grad_sync = group.finish_grad_sync = lambda **_: None

    return replace_attribute(DistributedDataParallel, "__init__", init)


def balance_per_trained_token() -> Any:
    """Divide the auxiliary loss, a sum over all tokens, by the number of trained tokens."""
    from slime_like.train.megatron.step import balance

    return replace_attribute(balance.ExpertBalance, "open_step", lambda *_: None)


def unsummed_head_norm() -> Any:
    """Skip the sum of the gradient of DeltaNet's head norm over tp ranks, which megatron-core skips too."""
    from slime_like.train.megatron.model import norms

    return replace_attribute(norms, "copy_to_tensor_model_parallel_region", lambda weight: weight)


def unordered_ranks() -> Any:
    """Pass tokens to Gated DeltaNet in the order of the context parallel ranks."""
    from slime_like.train.megatron.model import forward

    return replace_attribute(forward, "tokens_by_rank", lambda bounds, cp: np.arange(bounds[-1]))


def convolution_across_borders() -> Any:
    """Treat all packed sequences as one in the short convolution."""
    from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

    stock = TorchGDN.causal_conv

    def across(self: Any, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        return stock(self, x, weight, **{**kwargs, "cu_seqlens_cpu": kwargs["cu_seqlens_cpu"][[0, -1]]})

    return replace_attribute(TorchGDN, "causal_conv", across)


def gradient_of_own_range() -> Any:
    """Drop, in the backward pass of state passing, the gradients of this rank's state that come from later ranks."""
    from slime_like_plugins.qwen_gdn import ranges

    return replace_attribute(ranges, "gather_from_sequence_parallel_region", _GatherOwnGradient.of)


class _GatherOwnGradient(torch.autograd.Function):
    @staticmethod
    def of(local: Tensor, group: Any) -> Tensor:
        return _GatherOwnGradient.apply(local, group)

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.rank = dist.get_rank(group)
        out = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, local.contiguous(), group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank : ctx.rank + 1], None


def unscaled_float8() -> Any:
    """Cast float8 weights without their scales."""
    from slime_like.train.megatron.families import hf

    return replace_attribute(hf, "dequantise", lambda weight, *_: weight.float())


def keys_of_own_heads() -> Any:
    """Skip the sum over tensor parallel ranks of the gradient of the rotated key, which all heads share."""
    from megatron.core.transformer import multi_latent_attention as upstream

    stock = upstream.gather_from_sequence_parallel_region
    return replace_attribute(
        upstream,
        "gather_from_sequence_parallel_region",
        lambda x, **kwargs: stock(x, **kwargs, tensor_parallel_output_grad=False),
    )


def channels_paired_in_halves() -> Any:
    """Rotate the first half of a head's channels with the second half, as most families do, instead of neighbours."""
    from slime_like.train.megatron.model import transformer_config

    stock = transformer_config.transformer_config

    def halves(*args: Any) -> Any:
        config = stock(*args)
        config.rotary_interleaved = False
        return config

    from slime_like.train.megatron.rank import rank_model

    return replace_attribute(rank_model, "transformer_config", halves)


def angles_without_yarn() -> Any:
    """Compute rotary angles without YaRN's frequencies, with cosines, sines and scores scaled as YaRN requires."""
    from slime_like.train.megatron.model import model

    stock = model.Rotary.__init__

    def init(self: Any, hf: Any, head_dim: int, device: torch.device, **kwargs: Any) -> None:
        stock(self, hf, head_dim, device, **kwargs)
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.frequencies = 1.0 / (float(hf.rope_parameters["rope_theta"]) ** exponent)

    return replace_attribute(model.Rotary, "__init__", init)


def groups_ranked_by_megatron() -> Any:
    """Rank groups of experts as megatron does for every score function."""
    from slime_like.train.megatron.model.expert_choice import GroupLimitedChoice

    return replace_attribute(
        GroupLimitedChoice,
        "best",
        lambda self, scores, topk, num_groups, group_topk, default: default(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        ),
    )


def experts_of_the_next_token() -> Any:
    """Replay at each token the experts of the token after it."""
    from slime_like.train.megatron.step.routing import RoutingReplay

    stock = RoutingReplay.attach

    def attach(self: Any, micro: Any) -> Any:
        stock(self, micro)
        micro.experts = micro.experts.roll(-1, 1)
        return micro

    return replace_attribute(RoutingReplay, "attach", attach)


def norms_of_own_heads() -> Any:
    """Normalise queries and keys over the heads of one tensor parallel rank instead of the heads of all ranks."""
    from slime_like.train.megatron.model import norms

    stock = norms.reduce_from_tensor_model_parallel_region
    return replace_attribute(
        norms,
        "reduce_from_tensor_model_parallel_region",
        lambda x: stock(x) * 0 + 2 * x,  # so that both ranks still issue the collective
    )


def gradients_of_own_heads() -> Any:
    """Skip the sum over tensor parallel ranks of the gradient of a token's sum of squares, which all heads share."""
    from slime_like.train.megatron.model import norms

    return replace_attribute(norms, "copy_to_tensor_model_parallel_region", lambda x: x)


FAULTS: dict[str, Callable[[], Any]] = {
    "gradients_of_own_heads": gradients_of_own_heads,
    "norms_of_own_heads": norms_of_own_heads,
    "experts_of_the_next_token": experts_of_the_next_token,
    "keys_of_own_heads": keys_of_own_heads,
    "channels_paired_in_halves": channels_paired_in_halves,
    "angles_without_yarn": angles_without_yarn,
    "groups_ranked_by_megatron": groups_ranked_by_megatron,
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
    "unscaled_float8": unscaled_float8,
}
