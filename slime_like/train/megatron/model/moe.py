"""MoE layers of the hybrid stack: megatron's modules, with a router that counts tokens per expert."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slime_like.train.megatron.model.dispatch import RowMoELayer
from slime_like.train.megatron.model.expert_choice import ExpertChoice, GroupLimitedChoice
from slime_like.train.megatron.model.grouped_mlp import GroupedMLP


def moe_builder(
    config: TransformerConfig, backend: BackendSpecProvider, grouped: type[GroupedMLP]
) -> partial[MoELayer]:
    """Return the builder of an MoE layer, whose experts (and shared expert, if any) are MLPs of ``backend``'s linear layers.

    With moe_grouped_gemm, a ``grouped`` module computes the experts of a layer; otherwise megatron computes them one by one.
    """
    stock: Any = get_moe_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts)
    submodules = dataclasses.replace(stock.keywords["submodules"], router=ExpertRouter)
    if not config.moe_grouped_gemm:
        return partial(MoELayer, submodules=submodules)
    linears = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    experts: Any = partial(grouped, submodules=linears)
    return partial(RowMoELayer, submodules=dataclasses.replace(submodules, experts=experts))


class ExpertRouter(TopKRouter):
    """megatron's router, with an auxiliary loss and a load. Their sums over the ranks do not depend on padding.

    With the same micro-batches, these sums do not depend on the parallel layout either. The auxiliary loss of an optimizer step
    (Switch Transformer, arXiv:2101.03961, eq. 4, with its coefficient) is the mean over the step's tokens. A micro-batch is
    therefore weighted by T, its number of tokens on all tensor and context parallel ranks. The load is the number of this rank's
    tokens per expert in training passes since the last call of ``pop_load_and_balance``.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.router_replay: Any = expert_choice(config)
        self._reset_load()

    def _reset_load(self) -> None:
        self._load_E: Tensor | None = None
        self._balance: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map hidden states [L, 1, H] to the routing weights and the mask of chosen experts, both [L, E].

        In training passes with an auxiliary loss, this method is a collective over the tensor and context parallel ranks.
        """
        self.router_replay.padding = padding_mask
        return super().forward(input, padding_mask)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map logits [L, 1, E] to the routing weights and the mask of chosen experts, both [L, E].

        In training passes with an auxiliary loss, this method is a collective over the tensor and context parallel ranks.
        """
        probs, chosen_LE = super().routing(logits, padding_mask)
        if self.training and torch.is_grad_enabled():
            counted_LE = chosen_LE if padding_mask is None else chosen_LE & ~padding_mask.reshape(-1, 1)
            self._load_E = _add(self._load_E, counted_LE.sum(0).double())
        return probs, chosen_LE

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Add ``routing_map`` to the optimizer step's count of tokens per expert, from which megatron updates the expert bias.

        Without an expert bias, or if gradients are disabled, nothing is added. megatron combines the padding mask with
        ``routing_map`` [L, E]. A mask [L] would be aligned with the experts instead of the tokens, so this method passes [L, 1].
        """
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Return ``probs`` with a backward pass that adds this rank's part of the gradient of (T * auxiliary loss).

        T is the micro-batch's number of tokens (see the class), so the product is a sum over these tokens, and a rank's part is
        that of its own tokens. The gradient includes the loss's coefficient. This rank's part of the product, without the
        coefficient, is added to the sum that ``pop_load_and_balance`` returns. Collective over the tensor and context parallel
        ranks.
        """
        coefficient = float(self.get_aux_loss_coeff("aux_loss"))
        count_E = routing_map.sum(0).to(scores_for_aux_loss.dtype)  # the caller has masked padding
        dist.all_reduce(count_E, group=self.tp_cp_group)
        share_E = count_E / count_E.sum().clamp(min=1.0)  # share of all ranks' choices
        balance = count_E.numel() * (share_E * scores_for_aux_loss.sum(0)).sum()  # sum over this rank's tokens
        self._balance = _add(self._balance, balance.detach().double()[None])
        scaled: Tensor = MoEAuxLossAutoScaler.apply(probs, coefficient * balance)  # pyright: ignore[reportAssignmentType]
        return scaled

    def pop_load_and_balance(self) -> tuple[Tensor, Tensor]:
        """Return and reset this rank's load F64 [E], and its sum F64 [] of the auxiliary loss.

        The sum is over this rank's tokens in training passes since the last call, without the loss's coefficient.
        """
        load_E, balance = self._load_E, self._balance
        self._reset_load()
        zeros = torch.zeros(self.num_experts or 0, dtype=torch.float64, device=self.weight.device)
        return zeros if load_E is None else load_E, zeros.sum() if balance is None else balance.sum()


def expert_choice(config: TransformerConfig) -> ExpertChoice:
    """Return the object that chooses the experts for a router."""
    sigmoid = config.moe_router_score_function == "sigmoid"
    probabilities = bool(config.moe_router_pre_softmax) and not sigmoid
    if config.moe_router_group_topk:
        return GroupLimitedChoice(2 if sigmoid else 1, scores_are_probabilities=probabilities)
    return ExpertChoice(scores_are_probabilities=probabilities)


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value
