"""A user's parts of the model, and a transport of its weights. They run on the trainer ranks.

The line for the family also names the config class with which an engine reads config.json.
"""

from __future__ import annotations

from typing import Any

from own_record import record
from torch import Tensor

from slime_like.interfaces import TensorMeta, WeightSource
from slime_like.train.megatron.families.qwen3_5 import Qwen35
from slime_like.train.megatron.model.layers import PackedAttention
from slime_like.weight_sync.tensor import TensorSender
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN


class OwnSender(TensorSender):
    """The transport ``tensor``."""

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        record("weight transport")
        return await super().send(source)


class OwnAttention(PackedAttention):
    """The attention ``torch``."""

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        record("attention")
        return super().forward(*arguments, **keywords)


class OwnGDN(TorchGDN):
    """The Gated DeltaNet backend ``torch`` under another name."""

    name = "own_gdn"

    def chunk_rule(self, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        record("GDN backend")
        return super().chunk_rule(*arguments, **keywords)


class OwnFamily(Qwen35):
    """Qwen3.5 under another model_type."""

    def __init__(self, hf: Any, tp: int) -> None:
        record("model family")
        super().__init__(hf, tp)
