"""model.*, parallel.* and optim.*: the trained model, its parallel layout and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.base import MISSING, Config, key, positive
from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.unused_keys import refuse_unused_keys


@dataclass(kw_only=True)
class ModelConfig(Config):
    """Policy and reference model."""

    hf_checkpoint: str = key(MISSING, "Folder with the HF config, tokenizer and safetensors that the run starts from.")
    megatron_checkpoint: str | None = key(
        None, "Megatron torch_dist folder with the weights to start from instead of hf_checkpoint's (slime: --load)."
    )
    ref_checkpoint: str | None = key(
        None, "HF or Megatron torch_dist folder of the reference policy; null: the initial policy."
    )
    family: str = key("auto", "Model family, which maps weight names; auto: chosen by model_type in the HF config.")
    dtype: str = key(
        "auto", "Compute dtype; auto: bfloat16 on GPU, float32 on CPU.", choices=("auto", "float32", "bfloat16")
    )
    attention: str = key(
        "auto",
        "Core attention, a name registered in ATTENTIONS: torch (slime_like's), te (TransformerEngine's, which must be installed) "
        "or auto (torch).",
    )
    gdn: GDNConfig = key(GDNConfig, "Gated DeltaNet layers of hybrid models.")
    cpu_kernels: str = key(
        "auto",
        "Kernels of a CPU trainer for attention, norms, rotary embedding, SwiGLU and log-probabilities: c (compiled when "
        "the run starts) or torch; auto: c if there is a C compiler and run.deterministic is false.",
        choices=("auto", "c", "torch"),
    )
    recompute: str = key(
        "none",
        "Activation recompute: none, selective (recompute_modules) or full.",
        choices=("none", "selective", "full"),
    )
    recompute_method: str = key(
        "uniform",
        "With recompute=full, uniform: save the input of each group of recompute_num_layers layers and recompute all layers; "
        "block: recompute only the first recompute_num_layers layers of each virtual pipeline stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = key(None, "Number of decoder layers for recompute_method; null: 1.")
    recompute_modules: list[str] = key(
        ["core_attn"],
        "Modules recomputed when recompute=selective: core_attn, mlp, layernorm; with experts also moe, shared_experts.",
    )
    logits_chunk: int = key(
        4096,
        "Tokens per chunk when log-probabilities are computed, which bounds the peak memory of the logits.",
    )
    megatron: dict[str, Any] = key({}, "Extra fields of megatron-core's TransformerConfig; unknown fields are refused.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "logits_chunk", "recompute_num_layers")
        if self.recompute != "full":
            setting = f"{prefix}recompute={self.recompute}"
            refuse_unused_keys(prefix, self, ("recompute_method",), setting, f"{prefix}recompute=full")


@dataclass(kw_only=True)
class ParallelConfig(Config):
    """Layout of the trainer. dp is the number of trainer ranks / (tp * pp * cp)."""

    tp: int = key(1, "Tensor parallel size.")
    pp: int = key(1, "Pipeline parallel size.")
    vpp: int = key(1, "Virtual pipeline stages per pipeline rank (interleaved schedule).")
    layers_per_virtual_stage: int | None = key(None, "Decoder layers per virtual stage, as an alternative to vpp.")
    first_stage_layers: int | None = key(None, "Decoder layers of the first pipeline rank; null: an even split.")
    last_stage_layers: int | None = key(None, "Decoder layers of the last pipeline rank; null: an even split.")
    pipeline_layout: str | None = key(
        None, "All pipeline segments in Megatron's notation: Ett|ttt|ttL (t layer, E embedding, L output layer)."
    )
    cp: int = key(1, "Context parallel size: ranks that share each sequence.")
    ep: int = key(
        1, "Expert parallel size: number of ranks (out of tp * cp * dp) over which each layer's experts are split."
    )
    etp: int = key(
        1,
        "Expert tensor parallel size: number of ranks over which each expert's matrices are sharded; a layer's experts occupy "
        "ep * etp ranks.",
    )
    sequence_parallel: bool = key(True, "Shard norms and residuals over tp too (no effect with tp=1).")
    distributed_optimizer: bool = key(True, "Shard optimizer state over dp.")
    overlap_grad_reduce: bool = key(False, "Reduce gradients over dp bucket by bucket during backward.")
    overlap_param_gather: bool = key(
        False, "Gather updated weights over dp during the next step's forward; needs overlap_grad_reduce."
    )
    bucket_size: int | None = key(
        None, "Parameters per bucket of overlap_grad_reduce; null: Megatron's max(40M, 1M * dp)."
    )
    max_tokens_per_rank: int = key(
        8192,
        "Maximum tokens per rank in a packed micro-batch, cp times as many over cp ranks; a longer sequence is a micro-batch of "
        "its own (slime: --max-tokens-per-gpu).",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "tp", "pp", "cp", "ep", "etp", "max_tokens_per_rank", "bucket_size")
        positive(prefix, self, "vpp", "layers_per_virtual_stage", "first_stage_layers", "last_stage_layers")


@dataclass(kw_only=True)
class OptimConfig(Config):
    """AdamW and learning-rate schedule."""

    lr: float = key(1e-6, "Peak learning rate.")
    min_lr: float = key(0.0, "Learning rate at the end of a decaying schedule.")
    schedule: str = key(
        "constant",
        "Learning rate after warm-up; wsd: constant, then a decay over the last wsd_decay_steps.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.")
    warmup_fraction: float | None = key(
        None, "Warm-up as a fraction of decay_steps, as an alternative to warmup_steps."
    )
    decay_steps: int | None = key(None, "Optimizer steps until min_lr, warm-up included; null: all steps of the run.")
    wsd_decay_steps: int | None = key(None, "Optimizer steps of the wsd decay; null: a tenth of decay_steps.")
    wsd_decay_style: str = key(
        "exponential",
        "Shape of the wsd decay.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    weight_decay: float = key(0.0, "Decoupled weight decay; norms and biases are exempt.")
    beta1: float = key(0.9, "Decay rate of Adam's first-moment estimate.")
    beta2: float = key(0.98, "Decay rate of Adam's second-moment estimate.")
    eps: float = key(1e-8, "Adam's epsilon.")
    clip_grad: float = key(1.0, "Maximum global gradient norm; 0: no clipping.")
    cpu_offload: bool = key(
        False, "Keep main weights and moments in host memory and run the optimizer there (no effect on CPU)."
    )
    cpu_offload_fraction: float = key(1.0, "Fraction of the parameters that cpu_offload moves to host memory.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "eps", "decay_steps", "wsd_decay_steps", "cpu_offload_fraction")
        if self.schedule != "wsd":
            setting = f"{prefix}schedule={self.schedule}"
            refuse_unused_keys(prefix, self, ("wsd_decay_style",), setting, f"{prefix}schedule=wsd")
        if not self.cpu_offload:
            setting = f"{prefix}cpu_offload=false"
            refuse_unused_keys(prefix, self, ("cpu_offload_fraction",), setting, f"{prefix}cpu_offload=true")
