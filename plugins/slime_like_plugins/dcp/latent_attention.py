"""Attention on a CPU over latents (``sglang_cpu.latent_attention``) that are spread over the ranks of a DCP group.

All ranks that compute heads of a token also compute its latents, so a group may include all these ranks. For attention backends
on GPUs, SGLang's model itself exchanges queries and latents. Here the model computes as without DCP, and the backend does the
exchange.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from torch import Tensor

from slime_like_plugins.dcp.attention import ShardedAttention
from slime_like_plugins.plugin_names import DCP
from slime_like_plugins.sglang_cpu.kernels import CKernels
from slime_like_plugins.sglang_cpu.latent_attention import KeysAsValues, absorbed
from slime_like_plugins.sglang_cpu.process import ATTENTION
from slime_like_plugins.sglang_hooks import stop_on

METADATA = "prepare_context_parallel_metadata_for_dcp"
RESOLVED = "write_loc_is_dcp_resolved"


class ShardedLatentAttention(KeysAsValues, ShardedAttention):
    """Batched attention backend with absorbed queries for one rank of a DCP group."""

    def __init__(self, runner: Any, kernels: CKernels | None = None) -> None:
        super().__init__(runner, kernels)
        AttentionBackendRegistry.register(ATTENTION, absorbed)
        leave_exchange_to_backend(runner.model, self.token_to_kv_pool)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """Return attention [T, H * latent] for q [T, H, D] and new keys k [T, 1, D].

        If ``save_kv_cache``, also store this rank's part of k. Collective over the DCP group in a decode step, or if a request
        has a cached prefix.
        """
        out = super()._forward(q, k, k, layer, forward_batch, save_kv_cache)
        return out.view(len(out), -1, layer.qk_head_dim)[..., : layer.v_head_dim].reshape(len(out), -1)


def leave_exchange_to_backend(model: Any, pool: Any) -> None:
    """Disable the DCP exchanges in ``model``, and tell ``pool`` that the slots it gets are already rows of this rank.

    Raises ``SystemExit`` if SGLang's attributes do not exist. Remove when an attention backend of SGLang can declare
    that it does the exchange.
    """
    layers = [module for module in model.modules() if hasattr(module, "attn_mqa")]
    missing = [] if layers else [f"{type(model).__name__} has no layer with attn_mqa"]
    missing += [f"{type(layer).__name__} has no dcp_size" for layer in layers if not hasattr(layer, "dcp_size")]
    missing += [f"{type(model).__name__} has no {METADATA}"] * (not hasattr(model, METADATA))
    missing += [f"{type(pool).__name__} has no {RESOLVED}"] * (not hasattr(pool, RESOLVED))
    stop_on(DCP, missing)
    for layer in layers:
        layer.dcp_size = 1
    setattr(model, METADATA, lambda *_: None)
    setattr(pool, RESOLVED, True)
