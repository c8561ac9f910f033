"""MiMo-7B: Qwen2 with layers for multi-token prediction, which are not trained."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.qwen2 import Qwen2


class Mimo(Qwen2):
    """Family with the tensor names of Xiaomi's ``MiMoForCausalLM``."""

    untrained_prefixes = ("model.mtp_layers.",)

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("attention_bias", True)
