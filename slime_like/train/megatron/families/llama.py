"""Llama 2 and 3: neither norms on heads nor biases; from 3.1 on with scaled rotary frequencies."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.dense import DenseDecoder


class Llama(DenseDecoder):
    """Names as in transformers' ``LlamaForCausalLM``."""

    model_types = ("llama",)

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("attention_bias", False)
        self.require("mlp_bias", False)
