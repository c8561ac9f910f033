"""Install the torch replacements in SGLang's modules once the model is loaded.

Every replaced name must exist. If SGLang stops calling a function by its name, a Triton kernel is called instead and fails
on a CPU at the first forward. Remove when SGLang's platforms dispatch these functions as they dispatch layers (a
linear-attention backend cannot be registered for Gated DeltaNet: ``GDNKernelDispatcher`` rejects unknown names).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_cpu import projection_norm
from slime_like_plugins.sglang_cpu.hybrid import checkpoints, conv, delta_rule, layers
from slime_like_plugins.sglang_hooks import replace_target

ATTENTION = "sglang.srt.layers.attention.linear"
MODELS = "sglang.srt.models"
FLA = "sglang.kernels.ops.attention.fla"
BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
REPLACED: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{ATTENTION}.gdn_backend", "causal_conv1d_fn", conv.causal_conv1d_fn),
    (f"{ATTENTION}.gdn_backend", "causal_conv1d_update", conv.causal_conv1d_update),
    (f"{ATTENTION}.gdn_backend", "fused_gdn_gating", delta_rule.fused_gdn_gating),
    (
        f"{ATTENTION}.kernels.gdn_triton",
        "fused_sigmoid_gating_delta_rule_update",
        delta_rule.fused_sigmoid_gating_delta_rule_update,
    ),
    (f"{FLA}.layernorm_gated", "layernorm_fn", layers.layernorm_fn),
    (BACKEND, "track_mamba_states_if_needed", checkpoints.copy_states),
    (BACKEND, "track_mamba_states_all_layers", checkpoints.copy_states_of_all_layers),
)
OF_MODELS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{MODELS}.qwen3_next", "fused_qkvzba_split_reshape_cat", layers.split_by_key_head),
    (f"{MODELS}.qwen3_5", "fused_qkvzba_split_reshape_cat_contiguous", layers.split_contiguous),
    (f"{MODELS}.qwen3_5", "fused_sigmoid_mul", layers.fused_sigmoid_mul),
    (f"{MODELS}.qwen2_moe", "fused_gate_sigmoid_mul_add", layers.fused_gate_sigmoid_mul_add),
    (f"{MODELS}.minimax_m2", "rms_sumsq_serial", projection_norm.sums_of_squares),
    (f"{MODELS}.minimax_m2", "rms_apply_serial", projection_norm.normalise),
)


def bind(model: Any) -> str | None:
    """Replace the Triton kernels of ``model``. Return a description of its linear attention; None if it has none.

    Model modules that SGLang has not imported are skipped; an engine usually imports those of one model. Raises ``SystemExit`` if
    a name does not exist.
    """
    for module, name, function in OF_MODELS:
        if module in sys.modules:
            replace_target(CPU, f"{module}.{name}", function)
    if not is_hybrid(model):
        return None
    for module, name, function in REPLACED:
        replace_target(CPU, f"{module}.{name}", function)
    replace_target(CPU, "torch.Tensor.pin_memory", checkpoints.unpinned)
    kernel = f"{ATTENTION}.kernels.gdn_triton.TritonGDNKernel"
    replace_target(CPU, f"{kernel}.extend", delta_rule.extend)
    replace_target(CPU, f"{kernel}.supports_track_state_snapshot", True)  # extend returns states for the prefix cache
    # A packed decode fuses several functions replaced here into one Triton kernel.
    replace_target(CPU, f"{kernel}.supports_packed_decode", False)
    replace_target(CPU, f"{FLA}.fused_norm_gate.FusedRMSNormGated.forward", layers.fused_norm_forward)
    return "gated delta rule in torch"


def is_hybrid(model: Any) -> bool:
    """Return True if a layer of ``model`` is linear attention."""
    return any(type(module).__name__ == "RadixLinearAttention" for module in model.modules())
