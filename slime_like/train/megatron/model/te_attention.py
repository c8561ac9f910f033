"""TransformerEngine's core attention. Import this file only for ``model.attention=te`` on a GPU."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from slime_like.config.rules.attention import INSTALL
from slime_like.errors import ConfigError
from slime_like.train.megatron.model.layers import PackedRows, refuse_dropout

if not HAVE_TE:  # megatron's class is then a mock
    raise ConfigError(
        f"model.attention=te, but transformer_engine cannot be imported: {INSTALL}, or set model.attention=auto"
    )

_Base: Any = TEDotProductAttention


class TEAttention(_Base):
    """megatron's wrapper around TransformerEngine's DotProductAttention for packed rows.

    TransformerEngine selects a kernel of flash-attn or cuDNN. Under context parallelism it exchanges keys and values in
    a ring, overlapped with attention (Ring Attention, https://arxiv.org/abs/2310.01889), with the same chunks per rank
    as ``layout``. This module has no parameters, so checkpoints do not depend on the attention backend.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        **kwargs: Any,
    ) -> None:
        assert attn_mask_type == AttnMaskType.causal, f"{attn_mask_type} attention over packed sequences"
        refuse_dropout(config, attention_dropout)
        super().__init__(config, layer_number, attn_mask_type, attention_type, attention_dropout, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map query [L, heads, dim], key and value [L, groups, dim] of the local tokens to [L, heads * dim].

        Collective over the context parallel ranks.
        """
        assert isinstance(packed_seq_params, PackedRows) and attention_mask is None and attention_bias is None
        # padding_causal is TransformerEngine's name for the causal mask over packed sequences, with or without padding.
        out: Tensor = super().forward(
            query, key, value, None, AttnMaskType.padding_causal, packed_seq_params=packed_seq_params.on_device()
        )
        return out.reshape(len(query), -1)
