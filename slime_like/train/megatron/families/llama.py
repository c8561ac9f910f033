"""Llama 2 and 3, without biases and without norms on heads; Llama 3.1 and later scale the rotary frequencies."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.dense import DenseDecoder


class Llama(DenseDecoder):
    """Family with the tensor names of transformers' ``LlamaForCausalLM``."""

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("attention_bias", False)
        self.require("mlp_bias", False)
