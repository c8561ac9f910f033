"""Critic model (a policy's decoder with a value head instead of the output layer), and its values for micro-batches."""

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
from slime_like.train.megatron.model.model import ModelSegments, PolicyModel
from slime_like.train.megatron.platform.device import current_device
from slime_like.train.megatron.platform.groups import RankInfo


class ValueHead(torch.nn.Module):
    """Linear head with one float32 value per hidden state. Its initial weights are zero, whatever the layout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": current_device()}
        self.weight = torch.nn.Parameter(torch.zeros((1, config.hidden_size), **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Map [N, H] to F32 [N]."""
        return F.linear(hidden_NH.float(), self.weight.float(), self.bias.float())[:, 0]


class ValueModel(PolicyModel):
    """Decoder with a value head, which each tensor parallel rank applies to all tokens, so that each has the full gradient."""

    head = "value"

    def __init__(
        self, config: TransformerConfig, family: Family, rank_info: RankInfo, segment: int, parts: LayerParts
    ) -> None:
        super().__init__(config, family, rank_info, segment, parts)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config)

    @classmethod
    def adapt_config(cls, hf: Any) -> Any:
        """Return the HF config without tied embeddings, because there is no output layer."""
        config = copy.deepcopy(hf)
        config.tie_word_embeddings = False
        return config

    def values(self, hidden: Tensor, source_N: Tensor) -> Tensor:
        """Return F32 [N]: the value at each hidden state that ``source_N`` indexes.

        The value estimates the return from the next token on. With sequence parallelism, this method is a collective over
        the tensor parallel ranks.
        """
        if self.config.sequence_parallel:
            # Every rank computes all values and has the full gradient, which the backward pass must split, not sum.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self.value_head(hidden[:, 0][source_N])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sharded state as ``MegatronModule`` does: the method of megatron's LanguageModule needs an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


@torch.no_grad()
def value_micros(wrapped: ModelSegments, micros: Sequence[MicroBatch]) -> list[Tensor]:
    """Return F32 [T] per micro-batch: the critic's value just before each trained token, 0 at other tokens. Collective.

    The list is empty except on the last stage, where every context parallel rank has the values of all tokens.
    """
    model = wrapped.last
    assert isinstance(model, ValueModel)

    def on_output(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
        predictions = micro.layout.predictions(micro.batch.loss_weight > 0)
        out = torch.zeros(micro.layout.num_tokens, device=hidden.device)
        values_N = model.values(hidden, to_device(predictions.source, hidden.device))
        out[to_device(predictions.target, hidden.device)] = values_N
        return out

    wrapped.eval()
    try:
        return sum_columns(run_schedule(wrapped, micros, on_output, train=False), model.cp_group)
    finally:
        wrapped.train()
