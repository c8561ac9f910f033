"""Attention on a CPU over a KV cache that is spread over the ranks of a DCP group.

Each rank of a group has the same KV head and stores every ``dcp``-th token of a sequence. In a decode step, each rank
computes attention of the whole group's query heads over its own tokens, and the ranks exchange outputs and log-sum-exps. In a
prefill, each rank computes attention among the new tokens without communication; only attention to cached prefixes is
exchanged.

Axes as in ``sglang_cpu.attention``, and A: query heads of all ranks of the group.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from slime_like_plugins.dcp.group_queries import group_queries
from slime_like_plugins.dcp.layout import local_lens, prefix_buckets, token_table
from slime_like_plugins.dcp.merge import EXCHANGES, merge
from slime_like_plugins.sglang_cpu.attention import BatchedAttention, LengthBucket, decode_buckets, extend_buckets
from slime_like_plugins.sglang_cpu.kernels import CKernels

logger = logging.getLogger(__name__)

# The operator behind scaled_dot_product_attention, which itself returns no log-sum-exp.
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class ShardedBatch:
    """Layout of the batch of one forward pass on this rank, the same for all layers."""

    stored_T: Tensor  # tokens of the packed batch that this rank stores
    rows_T: Tensor  # rows of the pool in which it stores them
    table: Tensor  # int32 [B, L]: rows of the pool that hold this rank's tokens of each request
    lens_B: Tensor  # number of these rows; prefill: of the cached prefix only
    buckets: list[LengthBucket] = field(default_factory=list[LengthBucket])  # attention to this rank's rows
    new_buckets: list[LengthBucket] = field(default_factory=list[LengthBucket])  # prefill: attention among new tokens
    prefixed_T: Tensor | None = None  # prefill: tokens of requests with a cached prefix; None if there are none


class ShardedAttention(BatchedAttention):
    """Batched attention backend for one rank of a DCP group."""

    def __init__(self, runner: Any, kernels: CKernels | None = None) -> None:
        super().__init__(runner, kernels)
        parallel = get_parallel()
        self._group: Any = parallel.dcp_group
        self._size, self._rank = int(parallel.attn_dcp_size), int(parallel.attn_dcp_rank)
        self._exchange = EXCHANGES[parallel.dcp_comm_backend]
        self._batch: ShardedBatch | None = None
        self._queries = group_queries(runner.model, self._group) if parallel.dcp_replicate_q_proj else {}
        if self._queries:
            logger.info("each rank computes the queries of its group in %d layers", len(self._queries))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute the layout of the batch for this forward pass."""
        self._batch = None
        mode, size = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle():
            return
        # A prefill of data-parallel attention is padded, and SGLang passes only the rows before the padding to
        # attention.
        num_tokens = None if mode.is_decode() else sum(list(forward_batch.extend_seq_lens_cpu)[:size])
        slots_T = forward_batch.out_cache_loc[:num_tokens]
        stored_T = torch.nonzero(slots_T % self._size == self._rank)[:, 0]
        rows = forward_batch.req_pool_indices[:size].long()
        if mode.is_decode():
            seq_lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
            cached_B = seq_lens[:size].long()  # includes this step's token, which is stored before attention
        else:
            cached_B = torch.tensor(list(forward_batch.extend_prefix_lens_cpu)[:size])
        lens_B = local_lens(cached_B, self._size, self._rank)
        columns = slice(self._rank, self._rank + self._size * int(lens_B.max()), self._size)
        table = self.req_to_token_pool.req_to_token[rows, columns] // self._size
        self._batch = ShardedBatch(stored_T, slots_T[stored_T] // self._size, table, lens_B)
        if not mode.is_decode():
            self._sort_prefill(self._batch, list(forward_batch.extend_seq_lens_cpu)[:size], cached_B.tolist())
        elif self._c is None:
            self._batch.buckets = self._decode_buckets(table, lens_B)

    @staticmethod
    def _sort_prefill(batch: ShardedBatch, new: list[int], prefix: list[int]) -> None:
        """Set the buckets and ``prefixed_T`` of ``batch`` for requests with ``new[i]`` tokens after ``prefix[i]`` cached ones."""
        batch.new_buckets = extend_buckets(token_table(new), new, [0] * len(new))
        prefixed = [row for row in range(len(new)) if prefix[row] and new[row]]
        if prefixed:
            starts = [0, *torch.tensor(new).cumsum(0).tolist()]
            batch.prefixed_T = torch.cat([torch.arange(starts[row], starts[row] + new[row]) for row in prefixed])
            kv_lens = [int(batch.lens_B[row]) for row in prefixed]
            batch.buckets = prefix_buckets(batch.table[prefixed], [new[row] for row in prefixed], kv_lens)

    @staticmethod
    def _decode_buckets(table: Tensor, lens_B: Tensor) -> list[LengthBucket]:
        """Return buckets of the requests that have tokens on this rank."""
        rows = torch.nonzero(lens_B)[:, 0]
        if not len(rows):
            return []
        buckets = decode_buckets(table[rows], lens_B[rows].tolist())
        for bucket in buckets:
            bucket.tokens_bQ = rows[:, None] if bucket.tokens_bQ is None else rows[bucket.tokens_bQ]
        return buckets

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """Return attention [T, H * D] for q [T, H * D] and new k and v [T, K * D].

        If ``save_kv_cache``, also store this rank's part of k and v in the pool. Collective over the DCP group in a
        decode step, or if a request has a cached prefix.
        """
        assert self._batch is not None
        k_TKD = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v_TKD = v.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        if save_kv_cache:
            location, stored_T = KVWriteLoc(self._batch.rows_T, None), self._batch.stored_T
            self.token_to_kv_pool.set_kv_buffer(layer, location, k_TKD[stored_T], v_TKD[stored_T])
        pools = self._pools(layer)
        q_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).contiguous()
        replicated = self._queries.get(layer.layer_id)
        if forward_batch.forward_mode.is_decode():
            q_TAD = self._queries_of_all_ranks(q_THD) if replicated is None else replicated(forward_batch.positions)
            out_THD, _ = self._attend_cached(q_TAD, pools, layer.scaling, self._c)
        else:
            if replicated is not None:
                replicated.release()
            out_THD = self._prefill(q_THD, (k_TKD, v_TKD), pools, layer.scaling)
        return out_THD.to(q.dtype).reshape(len(q_THD), -1)

    def _prefill(
        self, q_THD: Tensor, new_TKD: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Return attention [T, H, D] of new tokens to each other and to the cached prefixes on all ranks.

        Collective over the DCP group if a request has a cached prefix.
        """
        assert self._batch is not None
        prefixed_T = self._batch.prefixed_T
        if prefixed_T is None:
            return self._attend_over(self._batch.new_buckets, q_THD, *new_TKD, scale)
        out_THD, lse_TH = self._attend_partially(self._batch.new_buckets, q_THD, *new_TKD, scale)
        cached_THD, cached_TH = self._attend_cached(self._queries_of_all_ranks(q_THD[prefixed_T]), pools, scale, None)
        outs = torch.stack((out_THD[prefixed_T], cached_THD))
        out_THD[prefixed_T], _ = merge(outs, torch.stack((lse_TH[prefixed_T], cached_TH)))
        return out_THD

    def _queries_of_all_ranks(self, q_THD: Tensor) -> Tensor:
        """Return the queries of all ranks, [T, A, D]. Collective over the DCP group."""
        return self._group.all_gather(q_THD, dim=1).contiguous()

    def _attend_cached(
        self, q_TAD: Tensor, pools: tuple[Tensor, Tensor], scale: float, kernels: CKernels | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the tokens in the pools of all ranks. Return float32 [T, H, D] and log-sum-exp [T, H].

        Collective over the DCP group.
        """
        batch = self._batch
        assert batch is not None
        if kernels is None:
            out_TAD, lse_TA = self._attend_partially(batch.buckets, q_TAD, *pools, scale)
        else:
            rows_B = torch.arange(len(batch.lens_B))
            out_TAD, lse_TA = kernels.partial_attention(q_TAD, pools, batch.table, rows_B, batch.lens_B, scale)
        return self._exchange(out_TAD, lse_TA, self._group)

    def _attend_partially(
        self, buckets: list[LengthBucket], q_THD: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of the heads of ``q_THD`` bucket by bucket. Return float32 [T, H, D] and log-sum-exp [T, H].

        Tokens in no bucket get 0 and -inf.
        """
        out_THD = torch.zeros(q_THD.shape)
        lse_TH = torch.full(q_THD.shape[:2], -math.inf)
        for bucket in buckets:
            assert bucket.tokens_bQ is not None
            folded_queries, k_bKLD, v_bKLD = self._folded(bucket, q_THD[bucket.tokens_bQ], keys, values)
            mask = bucket.mask(torch.float32, q_THD.shape[1] // keys.shape[1])
            out, lse = FLASH_ATTENTION(
                folded_queries.float(), k_bKLD.float(), v_bKLD.float(), attn_mask=mask, scale=scale
            )
            o_bQHD, lse_bQH1 = (self._unfolded(t, bucket.tokens_bQ.shape[1]) for t in (out, lse[..., None]))
            tokens = bucket.tokens_bQ if bucket.valid_bQ is None else bucket.tokens_bQ[bucket.valid_bQ]
            valid = slice(None) if bucket.valid_bQ is None else bucket.valid_bQ
            out_THD[tokens], lse_TH[tokens] = o_bQHD[valid], lse_bQH1[valid][..., 0]
        return out_THD, lse_TH
