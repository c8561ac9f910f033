"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, and routed experts in groups after the first layers."""

from __future__ import annotations

from slime_like.train.megatron.families.grouped_experts import BiasedExperts, GroupedExperts
from slime_like.train.megatron.families.latent import LatentDecoder


class DeepseekV2(GroupedExperts, LatentDecoder):
    """Family with the tensor names of transformers' ``DeepseekV2ForCausalLM``."""

    shape_keys = (*GroupedExperts.shape_keys, *LatentDecoder.shape_keys)


class DeepseekV3(BiasedExperts, LatentDecoder):
    """Family with the tensor names of transformers' ``DeepseekV3ForCausalLM``, also for Kimi K2."""

    shape_keys = (*BiasedExperts.shape_keys, *LatentDecoder.shape_keys)
