"""Choice of the experts of each token: the experts with the best scores, or a recorded choice that is replayed.

Replay fixes only the indices. The routing weights are computed from the router's scores at these indices, so the router
receives gradients (R3, https://arxiv.org/abs/2510.11370).

Axis suffixes: L tokens of this rank, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class ChoiceCounts:
    """Comparison of replayed choices with the router's own, over the tokens of this rank."""

    num_tokens: Tensor | float = 0.0
    num_different: Tensor | float = 0.0  # tokens whose replayed experts differ from the router's own
    max_gap: Tensor | float = 0.0  # largest ``ExpertChoice.gap`` between the two sets of experts of a token

    @torch.no_grad()
    def add(self, known_L: Tensor, different_L: Tensor, gaps_L: Tensor) -> None:
        """Add the tokens of a micro-batch.

        ``known_L`` masks tokens with a replayed choice, ``different_L`` those for which it differs from the router's own
        choice. ``gaps_L`` is the result of ``ExpertChoice.gap``.
        """
        self.num_tokens = self.num_tokens + known_L.sum()
        self.num_different = self.num_different + different_L.sum()
        largest = gaps_L.masked_fill(~different_L, 0.0).amax()
        self.max_gap = torch.maximum(torch.as_tensor(self.max_gap).to(largest), largest)


class ExpertChoice:
    """Expert choice of one router, which calls this object for each choice in place of megatron's router replay object.

    Of the tensors in a ``MicroBatch``, a router receives only the padding mask. It is the same tensor in forward passes and in
    all kinds of recompute, so its address identifies the micro-batch.
    """

    layer_number: int | None = None  # set by megatron

    def __init__(self, *, scores_are_probabilities: bool = False) -> None:
        self._scores_are_probabilities = scores_are_probabilities
        self.padding: Tensor | None = None  # mask of the current micro-batch
        # Address of a mask -> [L, K], integers of any type; equal integers in the row of a token without a replayed choice.
        self.replayed_experts: Mapping[int, Tensor] = {}
        self.recorded_experts: dict[int, Tensor] | None = None  # address of a mask -> [L, K]; None: nothing is recorded
        self.compares = False  # True: replayed choices are compared with the router's own
        self.counts = ChoiceCounts()

    def best(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices [L, K] of the experts that the router itself chooses by ``scores`` [L, E]."""
        return default(scores, topk, num_groups=num_groups, group_topk=group_topk)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices [L, K] of the experts to use: the replayed ones or, for tokens without any, the router's own.

        The router's own choice is recorded unless ``recorded_experts`` is None, and compared with a replayed one if ``compares``
        is True. Replay requires K >= 2.
        """
        values, own_LK = self.best(scores, topk, num_groups, group_topk, default)
        address = -1 if self.padding is None else self.padding.data_ptr()
        if self.recorded_experts is not None:
            self.recorded_experts[address] = own_LK.to(torch.int16)
        replayed = self.replayed_experts.get(address)
        if replayed is None:
            return values, own_LK
        replayed_LK = replayed.to(own_LK.dtype)
        known_L = replayed_LK[:, 0] != replayed_LK[:, 1]
        chosen_LK = torch.where(known_L[:, None], replayed_LK, own_LK)
        if self.compares:
            different_L = (own_LK.sort(1).values != chosen_LK.sort(1).values).any(1)
            units = scores.detach().log() if self._scores_are_probabilities else scores.detach()
            self.counts.add(known_L, different_L, self.gap(units, own_LK, chosen_LK, num_groups, group_topk))
        return scores.gather(1, chosen_LK), chosen_LK

    def gap(
        self, scores: Tensor, own_LK: Tensor, chosen_LK: Tensor, num_groups: int | None, group_topk: int | None
    ) -> Tensor:
        """Return [L]: the lowest score among the router's own experts ``own_LK`` minus the lowest among ``chosen_LK``."""
        del num_groups, group_topk
        return scores.gather(1, own_LK).amin(1) - scores.gather(1, chosen_LK).amin(1)


class GroupLimitedChoice(ExpertChoice):
    """Choice of experts within the best groups (DeepSeek-V2, arXiv:2405.04434, 2.2.2; V3, arXiv:2412.19437, 2.1.2).

    Groups are ranked by the sum of their ``num_group_scores`` best scores; megatron sums topk / group_topk scores instead.
    """

    def __init__(self, num_group_scores: int, *, scores_are_probabilities: bool = False) -> None:
        super().__init__(scores_are_probabilities=scores_are_probabilities)
        self.num_group_scores = num_group_scores

    def best(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Any
    ) -> tuple[Tensor, Tensor]:
        """See ``ExpertChoice.best``."""
        assert num_groups and group_topk
        by_group = scores.unflatten(-1, (num_groups, -1))
        best = self._groups(scores, num_groups).topk(group_topk, -1, sorted=False).indices
        outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
        return by_group.masked_fill(outside[..., None], float("-inf")).flatten(-2).topk(topk, -1)

    def gap(
        self, scores: Tensor, own_LK: Tensor, chosen_LK: Tensor, num_groups: int | None, group_topk: int | None
    ) -> Tensor:
        """Return [L], as ``ExpertChoice.gap`` does, except for tokens with a chosen expert in a worse group than the router's.

        For such a token, return the lowest score of the router's own groups minus that of the groups of its chosen experts.
        """
        assert num_groups and group_topk
        groups = self._groups(scores, num_groups)
        last = groups.topk(group_topk, -1).values.amin(-1)
        between = (last - groups.gather(1, chosen_LK // (scores.shape[-1] // num_groups)).amin(-1)).clamp(min=0.0)
        return torch.where(between > 0, between, super().gap(scores, own_LK, chosen_LK, num_groups, group_topk))

    def _groups(self, scores: Tensor, num_groups: int) -> Tensor:
        """Return [L, groups]: the score of each group, which is the sum of its ``num_group_scores`` best scores."""
        return scores.unflatten(-1, (num_groups, -1)).topk(self.num_group_scores, -1).values.sum(-1)
