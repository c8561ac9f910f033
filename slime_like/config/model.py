"""model.* and parallel.*: what is trained and how it is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config.base import MISSING, Config, key, positive


@dataclass(kw_only=True)
class ModelConfig(Config):
    """The policy and its reference."""

    hf_checkpoint: str = key(MISSING, "Folder with the HF config, tokenizer and safetensors the run starts from.")
    ref_checkpoint: str | None = key(None, "HF folder of the reference policy; null: hf_checkpoint.")
    family: str = key("auto", "Weight-name family; auto: by the HF config's model_type.")
    dtype: str = key(
        "auto", "Compute dtype; auto: bfloat16 on GPU, float32 on CPU.", choices=("auto", "float32", "bfloat16")
    )
    recompute: str = key(
        "none",
        "Activation recompute: none, selective (recompute_modules) or full.",
        choices=("none", "selective", "full"),
    )
    recompute_modules: list[str] = key(["core_attn"], "Modules recomputed when recompute=selective.")
    logits_chunk: int = key(
        4096, "Tokens per chunk when logits become log-probabilities: bounds the peak of the vocabulary projection."
    )
    megatron: dict[str, Any] = key({}, "Extra megatron-core TransformerConfig fields; unknown ones are refused.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "logits_chunk")


@dataclass(kw_only=True)
class ParallelConfig(Config):
    """Layout of the trainer. dp is what is left of the trainer's ranks."""

    tp: int = key(1, "Tensor parallel size.")
    pp: int = key(1, "Pipeline parallel size.")
    cp: int = key(1, "Context parallel size: ranks that share each sequence.")
    ep: int = key(1, "Expert parallel size.")
    sequence_parallel: bool = key(True, "Shard norms and residuals over tp as well (no effect with tp=1).")
    distributed_optimizer: bool = key(True, "Shard optimizer state over dp.")
    max_tokens_per_rank: int = key(
        8192,
        "Token budget of one rank for a packed micro-batch; cp ranks hold cp times as much (slime: --max-tokens-per-gpu).",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "tp", "pp", "cp", "ep", "max_tokens_per_rank")


@dataclass(kw_only=True)
class OptimConfig(Config):
    """AdamW and its schedule."""

    lr: float = key(1e-6, "Peak learning rate.")
    min_lr: float = key(0.0, "Learning rate at the end of a decaying schedule.")
    schedule: str = key("constant", "Shape after warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.")
    decay_steps: int | None = key(None, "Optimizer steps until min_lr; null: all of the run's.")
    weight_decay: float = key(0.0, "Decoupled weight decay; norms and biases are exempt.")
    beta1: float = key(0.9, "Adam's first moment decay.")
    beta2: float = key(0.98, "Adam's second moment decay.")
    eps: float = key(1e-8, "Adam's epsilon.")
    clip_grad: float = key(1.0, "Largest global gradient norm; 0: no clipping.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "eps", "decay_steps")
