"""Dispatch of tokens to experts over expert parallel ranks: megatron's all-to-all with rows moved by index."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from slime_like.train.megatron.model.token_rows import Reorder, TokenRows, by_expert, token_rows


class RowDispatcher(MoEAlltoAllTokenDispatcher):
    """Replacement for megatron's dispatcher. It does not sort the [experts, tokens] mask or loop over experts.

    megatron adds the rows of a token one by one in the model's dtype; this class adds them in float32 and rounds once.
    """

    probs: Any = None  # Tensor [L, E] between dispatch and combine
    _rows: TokenRows | None = None
    _orders: tuple[Tensor, Tensor] | None = None  # index that orders the rows of all senders by expert, and its inverse
    _counts_SE: Tensor | None = None  # number of rows for this rank's experts by sender and expert, on the device

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return the number of rows for each expert of this rank, summed over the ranks that send them.

        These are all expert parallel and expert tensor parallel ranks. Collective over them.
        """
        counts: Tensor = super().preprocess(routing_map)
        self._counts_SE = self.num_global_tokens_per_local_expert if self._is_spread else None
        return counts

    @property
    def _is_spread(self) -> bool:
        """True if this rank has several experts and their rows come from several ranks, so the rows must be reordered."""
        return self.num_local_experts > 1 and self.tp_size * self.ep_size > 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Return a row [H] of ``hidden_states`` [L, 1, H] per token and chosen expert, and the expert's probability.

        The results are [R, H] and [R], ordered by expert. Collective, as ``preprocess`` is. With ``moe_shared_expert_overlap``,
        also start the communication of the shared experts over the tensor parallel ranks.
        """
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        counts_E = routing_map.sum(0)
        self._rows = token_rows(routing_map, counts_E, self.config.moe_router_topk)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        return self._rows.gather(hidden_states.flatten(0, 1)), self._rows.probabilities(probs)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> Any:
        """Return the rows for this rank's experts, sorted by expert; the number of rows per expert; and a probability per row.

        Collective over the expert tensor parallel ranks.
        """
        rows, probs = global_input_tokens, global_probs
        if self.tp_size > 1:
            rows, probs = self._gather(rows), self._gather(probs)
        if self._counts_SE is not None:
            self._orders = by_expert(self._counts_SE, len(rows))
            rows, probs = Reorder.apply(rows, *self._orders), Reorder.apply(probs, *self._orders)
        counts = self.tokens_per_expert
        for point in ("before_permutation_2", "before_finish"):
            counts = self._maybe_dtoh_and_synchronize(point, counts)
        return rows, counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Any:
        """Return the experts' results for the rows that the expert parallel ranks sent to this rank, in the received order.

        A result is the sum over the expert tensor parallel ranks. Collective over the expert tensor parallel ranks.
        """
        rows: Any = hidden_states
        if self._orders is not None:
            rows, self._orders = Reorder.apply(rows, *reversed(self._orders)), None
        return rows if self.tp_size == 1 else self._reduce_scatter(rows.to(self.probs.dtype)).to(rows.dtype)

    def _gather(self, local: Tensor) -> Tensor:
        """Return the rows that all expert tensor parallel ranks have received. Collective over these ranks.

        The exchange is an all-to-all, because gloo's all-gather requires equal row counts.
        """
        num_ranks = self.tp_size
        return all_to_all(self.tp_group, torch.cat([local] * num_ranks), self._sizes(), [len(local)] * num_ranks)

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        """Return the results for the rows that this rank has received, summed over the expert tensor parallel ranks.

        ``rows`` are this rank's results for the rows that all these ranks have received. Collective over these ranks.
        """
        sizes, num_ranks = self._sizes(), self.tp_size
        num_rows = sizes[self.tp_rank]
        return all_to_all(self.tp_group, rows, [num_rows] * num_ranks, sizes).unflatten(0, (num_ranks, num_rows)).sum(0)

    def _sizes(self) -> list[int]:
        """Return the number of rows that each expert tensor parallel rank has received."""
        splits: Any = self.output_splits_tp
        return splits.tolist()

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum of each token's rows, in the shape of the hidden states.

        With ``moe_shared_expert_overlap``, add the output of the shared experts.
        """
        assert self._rows is not None
        output = self._rows.combine(permutated_local_input_tokens).view(self.hidden_shape)
        # A reference to the probabilities would keep the layer's input and its gradient alive until the next forward pass.
        self._rows = self.probs = None
        if self.shared_experts is None:
            return output
        shared: Any = self.shared_experts.get_output()
        return output + shared


class RowMoELayer(MoELayer):
    """megatron's layer of experts with ``RowDispatcher`` instead of the all-to-all dispatcher."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        if type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.token_dispatcher = RowDispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
            )
