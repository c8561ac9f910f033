"""Choice of the attention backend on a CPU, for a KV cache of keys and values or of latents, whole or sharded over ranks."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.runtime_context import get_parallel

from slime_like_plugins.sglang_cpu import sharded
from slime_like_plugins.sglang_cpu.attention import BatchedAttention, require_plain_layers
from slime_like_plugins.sglang_cpu.process import ATTENTION
from slime_like_plugins.sglang_cpu.selection import latent_kernels, selected


def register() -> None:
    """Register the backend with SGLang as ``slime_like_cpu``."""
    register_attention_backend(ATTENTION)(create)


def create(runner: Any) -> BatchedAttention:
    """Return the attention backend for a model runner.

    Raises ``NotImplementedError`` if the backend does not support a layer of the model, or if the KV cache is sharded and
    the plugin ``dcp`` is not enabled.
    """
    is_sharded = get_parallel().attn_dcp_size > 1
    if runner.use_mla_backend:
        from slime_like_plugins.sglang_cpu.latent_attention import LatentAttentionBackend, require_latent_layers

        require_latent_layers(runner.model)
        new_backend = sharded.factory(latent=True) if is_sharded else LatentAttentionBackend
        return new_backend(runner, latent_kernels(runner.model_config.kv_lora_rank))
    require_plain_layers(runner.model)
    new_backend = sharded.factory(latent=False) if is_sharded else BatchedAttention
    return new_backend(runner, selected().c)
