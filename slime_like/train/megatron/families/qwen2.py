"""Qwen2 and Qwen2.5, dense: biases on query, key and value, no norm on heads."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.dense import DenseDecoder


class Qwen2(DenseDecoder):
    """Family with the tensor names of transformers' ``Qwen2ForCausalLM``."""

    qkv_bias = True

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("use_sliding_window", False)
