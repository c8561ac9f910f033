"""Experts of a rank, computed by ``grouped_products`` over the rows of all experts, with the parameters of ``SequentialMLP``.

Axes: R rows (tokens, ordered by expert), E experts of this rank, F features of SwiGLU, H hidden, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from slime_like.train.megatron.model.grouped_products import GroupedLinear, WeightedSwiGLU
from slime_like.train.megatron.platform.collective import wait_for_weights


class GroupedMLP(SequentialMLP):
    """SwiGLU experts without biases. Each of the two linear layers is one autograd function over the rows of all experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.config
        is_plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
        is_swiglu = config.gated_linear_unit and config.activation_func is F.silu and is_plain
        assert is_swiglu and not config.add_bias_linear, "the experts are not SwiGLU without biases"

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  megatron annotates no result
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' results [R, H] for rows [R, H], weighted by probabilities [R], and None as their bias.

        ``tokens_per_expert`` I64 [E] is the number of rows per expert. Collective, as ``weights_of`` is.
        """
        experts: Any = self.local_experts
        counts = tokens_per_expert.tolist()
        gate_up = self.product(permuted_local_hidden_states, counts, weights_of([e.linear_fc1 for e in experts]))
        activation = self.activate(gate_up, permuted_probs)
        return self.product(activation, counts, weights_of([e.linear_fc2 for e in experts])), None

    def product(self, rows_RI: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        """Return [R, O]: the rows of each expert, multiplied by the transpose of its weight [O, I]."""
        out: Any = GroupedLinear.apply(rows_RI, tuple(counts), *weights)
        return out

    def activate(self, gate_up: Tensor, probs_R: Tensor) -> Tensor:
        """Return silu(gate) * up * probability [R, F]; ``gate_up`` [R, 2 F] has the columns of gate, then those of up."""
        out: Any = WeightedSwiGLU.apply(gate_up, probs_R)
        return out


def weights_of(linears: Sequence[Any]) -> list[Tensor]:
    """Return the weights of ``linears`` after ``wait_for_weights``, which is a collective."""
    for linear in linears:
        wait_for_weights(linear)
    return [linear.weight for linear in linears]
