"""Attention over a KV pool of latents (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1), for prefill and decode.

SGLang multiplies queries by the keys' up projection and the output by the values' up projection (``w_kc``, ``w_vc``), so that a
token's latent and rotated key form one key of width D, shared by all heads, and its latent is the value. The axes are those of
``attention``, with one KV head.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from torch import Tensor

from slime_like_plugins.sglang_cpu.attention import BatchedAttention, LengthBucket
from slime_like_plugins.sglang_cpu.kernels import CKernels
from slime_like_plugins.sglang_cpu.process import ATTENTION


class KeysAsValues(BatchedAttention):
    """Batched attention over latents. Complete keys also serve as values.

    Subclasses keep only the latent part of the output.
    """

    def _pools(self, layer: Any) -> tuple[Tensor, Tensor]:
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return keys, keys

    def _gathered(self, bucket: LengthBucket, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        gathered = self._gather("k", keys, bucket.slots_bL)
        return gathered, gathered


class LatentAttentionBackend(KeysAsValues):
    """Batched backend for absorbed queries: SGLang has already multiplied them by the keys' up projection.

    ``attend`` returns weighted sums of complete keys, [T, H, D]; ``_forward`` returns their latent part.
    """

    def __init__(self, runner: Any, kernels: CKernels | None = None) -> None:
        super().__init__(runner, kernels)
        AttentionBackendRegistry.register(ATTENTION, absorbed)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """Return attention [T, H * latent] of q [T, H, D] to the keys in the pool.

        If ``save_kv_cache``, first store k [T, 1, D], the complete keys of the new tokens, in the pool. They contain v.
        """
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        q_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out_THD = self.attend(q_THD, self._pools(layer), layer.scaling, forward_batch)
        return out_THD[..., : layer.v_head_dim].reshape(len(q_THD), -1)


def absorbed(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """Return SGLang's forward method for absorbed queries; its default for unknown backends would prefill without the pool."""
    return AttnForwardMethod.MLA


def require_latent_layers(model: Any) -> None:
    """Raise ``NotImplementedError`` if an attention layer of ``model`` has a sliding window, or no latents that all heads share.

    Layers named ``attn_mha`` are not checked, because they do not read the KV pool.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention) or name.endswith(".attn_mha"):
            continue
        if layer.sliding_window_size > -1 or layer.tp_k_head_num != 1 or layer.qk_head_dim <= layer.v_head_dim:
            raise NotImplementedError(
                f"{ATTENTION}: {name} is not attention over latents that all heads share: set placement.device=cuda, or use "
                "another model"
            )
