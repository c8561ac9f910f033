"""The critic's model: a policy's decoder with a value head in place of the output layer, and its values per token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from slime_like.train.megatron.families.base import Family
from slime_like.train.megatron.model.forward import MicroBatch, run_schedule, sum_columns, to_device
from slime_like.train.megatron.model.layers import LayerParts
from slime_like.train.megatron.model.model import Chunks, PolicyModel
from slime_like.train.megatron.platform.device import current_device
from slime_like.train.megatron.platform.groups import RankInfo


class ValueHead(torch.nn.Module):
    """One number per hidden state, in float32. It starts at zero: an untrained critic expects nothing, in any layout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": current_device()}
        self.weight = torch.nn.Parameter(torch.zeros((1, config.hidden_size), **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N, H] -> F32 [N]."""
        return F.linear(hidden_NH.float(), self.weight.float(), self.bias.float())[:, 0]


class ValueModel(PolicyModel):
    """The head is the same on every tensor parallel rank, and each of them sees all tokens: its gradient is whole."""

    head = "value"

    def __init__(
        self, config: TransformerConfig, family: Family, place: RankInfo, chunk: int, parts: LayerParts
    ) -> None:
        super().__init__(config, family, place, chunk, parts)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config)

    @classmethod
    def adapt(cls, hf: Any) -> Any:
        """Without an output layer nothing is tied to the embedding."""
        adapted = copy.deepcopy(hf)
        adapted.tie_word_embeddings = False
        return adapted

    def values(self, hidden: Tensor, source_N: Tensor) -> Tensor:
        """F32 [N] values after the tokens at positions ``source_N`` of [L]."""
        if self.config.sequence_parallel:
            # Every rank computes all values, so each one's part of the gradient is already whole: split, do not sum.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self.value_head(hidden[:, 0][source_N])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """As for any module: megatron's language models add what an output layer needs."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


@torch.no_grad()
def value_micros(wrapped: Chunks, micros: Sequence[MicroBatch]) -> list[Tensor]:
    """F32 [T] values per micro-batch: at each trained token the value before it, 0 elsewhere.

    Empty but on the last stage; whole on every context parallel rank.
    """
    model = wrapped.last
    assert isinstance(model, ValueModel)

    def after(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
        found = micro.layout.predictions(micro.rows.loss_weight > 0)
        out = torch.zeros(micro.layout.num_tokens, device=hidden.device)
        out[to_device(found.target, hidden.device)] = model.values(hidden, to_device(found.source, hidden.device))
        return out

    wrapped.eval()
    try:
        return sum_columns(run_schedule(wrapped, micros, after, train=False), model.cp_group)
    finally:
        wrapped.train()
