"""Multi-head latent attention: megatron's module, with replicated down projections and rotary angles that all layers share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from slime_like.train.megatron.model.norms import RMSNorm
from slime_like.train.megatron.platform.device import current_device

NORM_EPSILON = 1e-6  # epsilon of the latents' norms in transformers, independent of rms_norm_eps


class LatentSelfAttention(MLASelfAttention):
    """megatron's latent attention over packed sequences, without TransformerEngine.

    Down projections are replicated over tensor parallel ranks. megatron would split them and lose the other ranks' part of the
    gradient of the rotated key, which all heads share. Sequence parallelism gives each rank a part of the tokens, so gradients
    of replicated weights are summed over the ranks.
    """

    def __init__(
        self,
        config: Any,
        submodules: MLASelfAttentionSubmodules,
        *args: Any,
        norm: type[RMSNorm],
        rotary_scale: float,
        **kwargs: Any,
    ) -> None:
        assert config.tensor_model_parallel_size == 1 or config.sequence_parallel, (
            "latent attention with tp, without sp"
        )
        latent_norm = partial(_norm, norm)
        super().__init__(
            config, replace(submodules, q_layernorm=latent_norm, kv_layernorm=latent_norm), *args, **kwargs
        )
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = ReplicatedLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.rotary_pos_emb = PrecomputedAngles(rotary_scale)

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        """Return the projections and norms of ``submodules`` unchanged, by field name.

        megatron's own rules would require TransformerEngine for queries without a latent.
        """
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {part: getattr(submodules, part) for part in parts}

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output [L, 1, H] of this rank's L hidden states [L, 1, H], and None as its bias.

        ``rotary_pos_emb`` [P, 1, 1, dim] covers the tokens of all context parallel ranks. Collective over the tensor and context
        parallel ranks.
        """
        self.rotary_pos_emb.angles = rotary_pos_emb
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


class ReplicatedLinear(torch.nn.Module):
    """Linear layer that every tensor parallel rank holds and applies to its own tokens."""

    def __init__(self, config: TransformerConfig, output_size: int) -> None:
        super().__init__()
        weight = torch.empty(output_size, config.hidden_size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (read by finalize_model_grads)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map [L, 1, H] to [L, 1, output_size], without a bias."""
        return F.linear(x, self.weight), None


class PrecomputedAngles(torch.nn.Module):
    """Rotary angles that the model has computed for all layers, in place of megatron's rotary embedding."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.angles: Tensor | None = None

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Return 0, because ``forward`` ignores the length: its angles are those of the packed tokens."""
        return 0

    def forward(self, length: int, packed_seq: bool) -> tuple[Tensor, float]:
        """Return the angles [P, 1, 1, dim] and the factor of their cosines and sines."""
        assert packed_seq and self.angles is not None
        return self.angles, self.scale


def latent_attention(core_attention: type, norm: type[RMSNorm], rotary_scale: float) -> ModuleSpec:
    """Return the spec of latent attention."""
    return ModuleSpec(
        LatentSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "norm": norm, "rotary_scale": rotary_scale},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,  # replaced by a replicated layer
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,  # replaced by a replicated layer
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _norm(norm: type[RMSNorm], config: TransformerConfig, hidden_size: int, eps: float) -> RMSNorm:
    return norm(config, hidden_size, NORM_EPSILON)
