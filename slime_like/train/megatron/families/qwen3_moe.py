"""Qwen3 with experts: Qwen3's attention, with a router and experts instead of the MLP."""

from __future__ import annotations

from slime_like.train.megatron.families.experts import Experts
from slime_like.train.megatron.families.qwen3 import Qwen3


class Qwen3Moe(Experts, Qwen3):
    """Family with the tensor names of transformers' ``Qwen3MoeForCausalLM``."""
