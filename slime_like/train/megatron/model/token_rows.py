"""Rows of tokens ordered by expert: each token has one row per chosen expert.

Axes: T tokens, K experts per token, R = T K rows, E experts, S ranks that send rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Positions of tokens in the rows, which are ordered by expert, then by token."""

    token_R: Tensor  # I64, token of each row
    row_TK: Tensor  # I64, rows of each token
    choice_R: Tensor  # I64, index of each row's choice among the T K choices, which are ordered by token
    expert_TK: Tensor  # I64, experts of each token

    def gather(self, x_TH: Tensor) -> Tensor:
        """Return the rows [R, H] of the tokens ``x_TH``."""
        rows: Tensor = GatherRows.apply(x_TH, self.token_R, self.row_TK)  # pyright: ignore[reportAssignmentType]
        return rows

    def combine(self, rows_RH: Tensor) -> Tensor:
        """Return the sum [T, H] of each token's rows."""
        total: Tensor = SumRows.apply(rows_RH, self.token_R, self.row_TK)  # pyright: ignore[reportAssignmentType]
        return total

    def probabilities(self, probs_TE: Tensor) -> Tensor:
        """Return the probability [R] of each row's expert."""
        return probs_TE.gather(1, self.expert_TK).flatten()[self.choice_R]


def token_rows(routing_map_TE: Tensor, counts_E: Tensor, top_k: int) -> TokenRows:
    """Return the rows for a mask of ``top_k`` experts per token, without waiting for the device.

    ``counts_E`` is the number of tokens per expert, on the mask's device.
    """
    num_tokens = len(routing_map_TE)
    num_rows, device = num_tokens * top_k, routing_map_TE.device
    expert_TK = torch.nonzero_static(routing_map_TE, size=num_rows)[:, 1].view(num_tokens, top_k)
    first_E = counts_E.cumsum(0) - counts_E
    row_TE = routing_map_TE.cumsum(0) + (first_E - 1)
    row_TK = row_TE.gather(1, expert_TK)
    choice_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    choice_R[row_TK.flatten()] = torch.arange(num_rows, device=device)
    return TokenRows(choice_R // top_k, row_TK, choice_R, expert_TK)


class GatherRows(torch.autograd.Function):
    """Rows [R, H], each a copy of its token in x [T, H].

    The other inputs are the token of each row [R] and the rows of each token [T, K].
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TH.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (row_TK,) = ctx.saved_tensors
        return _sum(grads[0], row_TK), None, None


class SumRows(torch.autograd.Function):
    """Sum [T, H] of the rows [R, H] of each token.

    The other inputs are the token of each row [R] and the rows of each token [T, K].
    """

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum(rows_RH, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (token_R,) = ctx.saved_tensors
        return grads[0].index_select(0, token_R), None, None


def _sum(rows_RH: Tensor, row_TK: Tensor) -> Tensor:
    """Return the sum of each token's rows, in one pass, rounded once."""
    return F.embedding_bag(row_TK, rows_RH, mode="sum")


class Reorder(torch.autograd.Function):
    """Rows [R, H] or [R] in the order of an index [R]. The third input is the inverse of the index."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse_R,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_R), None, None


def by_expert(counts_SE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the index [R] that orders rows by expert, and its inverse.

    The index applies to rows ordered by sender, then by expert. ``counts_SE`` has the number of rows per sender and expert.
    """
    counts_N = counts_SE.flatten()
    start_SE = (counts_N.cumsum(0) - counts_N).view_as(counts_SE)
    counts_M, start_M = counts_SE.T.flatten(), start_SE.T.flatten()  # ordered by expert, then by sender
    shift_M = start_M - (counts_M.cumsum(0) - counts_M)
    position_R = torch.arange(num_rows, device=counts_SE.device)
    index_R = position_R + torch.repeat_interleave(shift_M, counts_M, output_size=num_rows)
    inverse_R = torch.empty_like(index_R)
    inverse_R[index_R] = position_R
    return index_R, inverse_R
