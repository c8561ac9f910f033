"""Qwen3, dense: a norm on every query and key head, no biases."""

from __future__ import annotations

from typing import Any

from slime_like.train.megatron.families.dense import DenseDecoder


class Qwen3(DenseDecoder):
    """Family with the tensor names of transformers' ``Qwen3ForCausalLM``."""

    qk_norm = True

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        self.require("attention_bias", False)
        self.require("use_sliding_window", False)
