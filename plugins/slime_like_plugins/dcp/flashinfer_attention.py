"""FlashInfer attention on a GPU over a KV cache that is spread over the ranks of a DCP group.

SGLang's FlashInfer backend ignores DCP. This subclass changes the following; wrappers, workspaces and CUDA graphs remain
SGLang's:

- A rank stores the tokens of its own slots, in the rows of its pool.
- A plan covers the rows of this rank's tokens, and the query heads of the whole group.
- In a decode step, a rank computes attention of the gathered queries to its own tokens, and the ranks exchange outputs and
  log-sum-exps.
- In a prefill, new tokens attend to each other with this rank's heads and the new keys and values, without communication.
  Attention to the cached prefix is computed as in a decode step, without a mask, and both parts are merged by log-sum-exp.

The design follows SGLang's pull request 14982, with the communication of ``sglang.srt.layers.dcp``. Axes as in
``dcp.attention``: T tokens, H query heads of this rank, A query heads of all ranks of the group, K KV heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
from sglang.srt.environ import envs
from sglang.srt.layers.dcp import cp_lse_ag_out_rs_mha, dcp_a2a_lse_reduce
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

from slime_like.config.schema.dcp import SHARDED_FLASHINFER
from slime_like_plugins.dcp.flashinfer_plans import ShardedDecodePlans, ShardedPrefillPlans, ShardedReads, upstream
from slime_like_plugins.dcp.merge import merge

LN_2 = math.log(2)


def runner_obstacles(runner: Any) -> list[str]:
    """Return the features of ``runner``'s model, arguments and environment that this backend does not support."""
    reads_new_tokens = "which would read new tokens from the cache, where a rank has only its part"
    reasons = {
        "multi-head latent attention": runner.use_mla_backend,
        "sliding windows, whose KV cache SGLang does not shard": runner.sliding_window_size is not None,
        "cross attention and its custom masks": runner.model_config.is_encoder_decoder,
        "speculative decoding, whose verification has custom masks": get_spec().speculative_algorithm is not None,
        "multi-item scoring, which has custom masks": get_exec().features.enable_mis,
        f"enable_deterministic_inference, {reads_new_tokens}": (
            get_exec().deterministic.enable_deterministic_inference
        ),
        f"SGLANG_FLASHINFER_USE_PAGED, {reads_new_tokens}": envs.SGLANG_FLASHINFER_USE_PAGED.get(),
    }
    return [reason for reason, applies in reasons.items() if applies]


def layer_obstacle(layer: Any) -> str | None:
    """Return the reason why this backend cannot compute ``layer``; None if it can."""
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return f"a sliding window of {layer.sliding_window_size} tokens"
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        return f"attention of type {layer.attn_type!r}, not causal self-attention"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} elements"
    return None


class ShardedFlashInfer(upstream.FlashInferAttnBackend):
    """SGLang's FlashInfer backend for one rank of a DCP group.

    The constructor raises ``NotImplementedError`` if ``runner_obstacles`` finds an unsupported feature, if FlashInfer is not
    installed, or if the KV cache has 4 bits per element.
    """

    def __init__(self, runner: Any) -> None:
        if reasons := runner_obstacles(runner):
            raise NotImplementedError(
                f"rollout.dcp with FlashInfer attention does not support {'; '.join(reasons)}. Remove "
                "rollout.sglang.attention_backend, which selects triton, or set rollout.dcp=1"
            )
        if not hasattr(upstream, "BatchDecodeWithPagedKVCacheWrapper"):
            raise NotImplementedError(
                "rollout.sglang.attention_backend=flashinfer needs the package flashinfer_python: install it, or remove "
                "rollout.sglang.attention_backend"
            )
        super().__init__(runner, init_new_workspace=runner.init_new_workspace)
        if self.prefill_uses_dequant_workspace or self.decode_uses_dequant_workspace:
            raise NotImplementedError(
                "rollout.dcp does not support a KV cache of 4 bits: remove rollout.sglang.kv_cache_dtype, or set rollout.dcp=1"
            )
        parallel = get_parallel()
        self.group: Any = parallel.dcp_group
        self.size, self.rank = int(parallel.attn_dcp_size), int(parallel.attn_dcp_rank)
        self._all_to_all = parallel.dcp_comm_backend == "a2a"
        self.is_multimodal = False  # SGLang would read the new tokens of multimodal models from the cache
        table = runner.req_to_token_pool.req_to_token
        self.kv_index_translator = ShardedReads(self.kv_index_translator, table, self.size, self.rank)
        self.indices_updater_decode = ShardedDecodePlans(runner, self)
        self.indices_updater_prefill = ShardedPrefillPlans(runner, self)
        self.decode_use_tensor_cores = upstream.should_use_tensor_core(
            self.flashinfer_kv_cache_dtype,
            self.indices_updater_decode.num_qo_heads,
            self.indices_updater_decode.num_kv_heads,
        )
        self.decode_wrappers = [
            upstream.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace_buffer,
                "NHD",
                backend=self.decode_backend,
                use_tensor_cores=self.decode_use_tensor_cores,
            )
        ]

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a decode step that a CUDA graph captures or replays. Raises ``NotImplementedError`` for a prefill."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                f"{SHARDED_FLASHINFER} does not support a CUDA graph of a prefill: remove rollout.sglang.cuda_graph_config"
            )
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Return attention [T, H * D] of one token per request, for q [T, H * D], k and v [T, K * D].

        If ``save_kv_cache``, also store this rank's part of k and v. Collective over the DCP group.
        """
        q_THD, k_TKD, v_TKD = self._by_heads(q, k, v, layer)
        if save_kv_cache:
            self._store(k_TKD, v_TKD, layer, forward_batch)
        kv_indptr = self.kv_indptr[0][: len(q_THD) + 1]  # the buffer that a captured graph reads
        out_TAD, lse_TA = self._attend_rows(
            self.forward_metadata.decode_wrappers[0], q_THD, layer, kv_indptr[1:] == kv_indptr[:-1]
        )
        out_THD: Any
        if self._all_to_all:
            out_THD = dcp_a2a_lse_reduce(out_TAD, lse_TA, self.group, is_lse_base_on_e=True)
        else:
            out_THD = cp_lse_ag_out_rs_mha(self._wide(out_TAD), lse_TA, self.group)
        return out_THD.to(q.dtype).reshape(len(q_THD), -1)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Return attention [T, H * D] of new tokens to each other and to cached prefixes.

        The arguments are q [T, H * D], and k and v [T, K * D]. If ``save_kv_cache``, also store this rank's part of k and v.
        Collective over the DCP group if a request has a cached prefix.
        """
        q_THD, k_TKD, v_TKD = self._by_heads(q, k, v, layer)
        options = {"causal": True, "sm_scale": layer.scaling, "logits_soft_cap": layer.logit_cap}
        if self.forward_metadata.extend_no_prefix:
            out_THD = self.prefill_wrapper_ragged.forward(q_THD, k_TKD, v_TKD, **options)
        else:
            new_THD, new_TH = self.prefill_wrapper_ragged.forward_return_lse(q_THD, k_TKD, v_TKD, **options)
            cached_THD, cached_TH = self._attend_prefixes(q_THD, layer, forward_batch.batch_size)
            lses = torch.stack((new_TH * LN_2, cached_TH))
            out_THD, _ = merge(torch.stack((new_THD.float(), cached_THD)), lses)
        if save_kv_cache:  # after attention: a write to an FP8 cache scales k and v in place
            self._store(k_TKD, v_TKD, layer, forward_batch)
        return out_THD.to(q.dtype).reshape(len(q_THD), -1)

    def _attend_prefixes(self, q_THD: Tensor, layer: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        """Attend to the cached prefixes on all ranks. Return float32 [T, H, D] and natural log-sum-exp [T, H].

        Collective over the DCP group.
        """
        qo_indptr, kv_indptr = self.qo_indptr[0][: batch_size + 1], self.kv_indptr[0][: batch_size + 1]
        tokens = torch.arange(len(q_THD), dtype=qo_indptr.dtype, device=q_THD.device)
        request_T = torch.searchsorted(qo_indptr[1:], tokens, right=True).clamp_(max=batch_size - 1)
        wrapper = self.forward_metadata.prefill_wrappers[0]
        empty_T = (kv_indptr[1:] == kv_indptr[:-1])[request_T]
        out_TAD, lse_TA = self._attend_rows(wrapper, q_THD, layer, empty_T, causal=False)
        out, lse = cp_lse_ag_out_rs_mha(self._wide(out_TAD), lse_TA, self.group, return_lse=True)
        return out, lse

    def _attend_rows(
        self, wrapper: Any, q_THD: Tensor, layer: Any, empty_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of the group's queries to the cached tokens on this rank.

        Return [T, A, D] and natural log-sum-exp [T, A]. FlashInfer leaves its outputs undefined for queries whose
        requests have no cached token on this rank (``empty_T``); here they are 0 and -inf. Collective over the DCP group,
        because the queries are gathered.
        """
        q_TAD = self.group.all_gather(q_THD, dim=1).contiguous()
        out_TAD, lse_TA = wrapper.forward_return_lse(
            q_TAD,
            self.token_to_kv_pool.get_kv_buffer(layer.layer_id),
            sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap,
            k_scale=layer.k_scale_float,
            v_scale=layer.v_scale_float,
            **options,
        )
        lse_TA = (lse_TA * LN_2).masked_fill_(empty_T[:, None], -math.inf)
        return out_TAD.masked_fill_(empty_T[:, None, None], 0), lse_TA

    def _wide(self, out_TAD: Tensor) -> Tensor:
        """Return the outputs as float32, in which the ranks sum them. If symmetric memory is in use, the result lies in it."""
        with use_symmetric_memory(self.group):
            return out_TAD.float()

    def _store(self, k_TKD: Tensor, v_TKD: Tensor, layer: Any, forward_batch: Any) -> None:
        """Write the keys and values of this rank's slots to its pool. A scaled FP8 cache overwrites ``k_TKD`` and ``v_TKD``."""
        slots_T = forward_batch.out_cache_loc
        location = KVWriteLoc(slots_T // self.size, physical=forward_batch.out_cache_loc_is_physical)
        stored_T = slots_T % self.size == self.rank
        scales = self._kv_write_scales(layer)
        self.token_to_kv_pool.set_kv_buffer(layer, location, k_TKD, v_TKD, *scales, dcp_kv_mask=stored_T)

    def _by_heads(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, D], k and v [T, K, D].

        Raises ``NotImplementedError`` for a layer with a ``layer_obstacle`` or with the keys and values of another layer.
        """
        reason = layer_obstacle(layer)
        if reason is None and (k is None or v is None):
            reason = "keys and values of another layer"
        if reason is not None or k is None or v is None:
            raise NotImplementedError(
                f"{SHARDED_FLASHINFER} cannot compute layer {layer.layer_id}, which has {reason}: set rollout.dcp=1"
            )
        with use_symmetric_memory(self.group):  # the ranks gather q
            q = q.contiguous()
        return (
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.head_dim),
        )
