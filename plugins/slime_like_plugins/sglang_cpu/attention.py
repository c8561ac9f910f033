"""Batched attention on a CPU, in torch; decode steps may use the C kernels.

SGLang's ``torch_native`` backend loops over the requests of a batch in Python. Here the requests are sorted into
buckets of similar length once per forward; every layer then costs one gather and one fused attention per bucket. Query
heads that share a KV head become rows of one query, so keys and values are never repeated.

Axes: T tokens of the packed batch, b requests of a bucket, Q query positions, L KV positions, H query heads, K KV
heads, G = H / K, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from slime_like_plugins.sglang_cpu.kernels import CKernels
from slime_like_plugins.sglang_cpu.process import ATTENTION

MASK_ELEMENTS = 1 << 22  # largest mask of one bucket; longer prompts form smaller buckets
MERGE_FACTOR = 1.5  # decode in one bucket if it has at most MERGE_FACTOR * tokens + MERGE_TOKENS slots
MERGE_TOKENS = 2048


@dataclass(slots=True)
class LengthBucket:
    """Requests of similar length whose attention is computed together."""

    tokens_bQ: Tensor | None  # rows of the packed batch; None: all rows in order, one per request
    valid_bQ: Tensor | None  # False on padding; None: no padding
    slots_bL: Tensor  # rows of the KV pool; padding repeats the first
    visible_bQL: Tensor | None  # True: attend; None: everything
    masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict[tuple[torch.dtype, int], Tensor])

    def mask(self, dtype: torch.dtype, group: int) -> Tensor | None:
        """Return the additive mask for ``group`` (G) query heads per KV head; None if everything is visible.

        Its shape is [b, 1, G * Q, L], or [b, 1, 1, L] for Q = 1. It is cached for the other layers.
        """
        if self.visible_bQL is None:
            return None
        key = (dtype, group)
        if key not in self.masks:
            b, q, length = self.visible_bQL.shape
            mask = torch.zeros(b, 1, q, length, dtype=dtype).masked_fill_(~self.visible_bQL[:, None], float("-inf"))
            if q > 1:
                mask = mask.expand(b, group, q, length).reshape(b, 1, group * q, length)
            self.masks[key] = mask
        return self.masks[key]


def length_class(n: int) -> int:
    """Return the class of lengths that may share a bucket: the exponent of the smallest power of two >= n, at least 5."""
    return max(5, (n - 1).bit_length())


def padded_slots(table: Tensor, kv_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the KV-pool rows [b, L] of the tokens of b requests, and a mask [b, L] that is False on padding.

    ``table`` [b, max_len] contains the page-table rows of the requests: the pool row of each token. ``kv_lens``
    contains the number of tokens of each request; L is the maximum.
    """
    length = max(kv_lens)
    exists_bL = torch.arange(length)[None] < torch.tensor(kv_lens)[:, None]
    slots_bL = table[:, :length].long()
    return torch.where(exists_bL, slots_bL, slots_bL[:, :1]), exists_bL


def decode_buckets(table: Tensor, kv_lens: Sequence[int]) -> list[LengthBucket]:
    """Return buckets for one query per request.

    ``table`` [B, max_len] contains the page-table rows of the batch, ``kv_lens`` the number of tokens of each request.
    """
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(kv_lens):
        groups.setdefault(length_class(length), []).append(row)
    merge = len(kv_lens) * max(kv_lens) <= MERGE_FACTOR * sum(kv_lens) + MERGE_TOKENS
    if len(groups) == 1 or merge:
        slots_bL, exists_bL = padded_slots(table, kv_lens)
        ragged = min(kv_lens) < max(kv_lens)
        return [LengthBucket(None, None, slots_bL, exists_bL[:, None] if ragged else None)]
    buckets: list[LengthBucket] = []
    for members in groups.values():
        rows = torch.tensor(members)
        slots_bL, exists_bL = padded_slots(table[rows], [kv_lens[row] for row in members])
        buckets.append(LengthBucket(rows[:, None], None, slots_bL, exists_bL[:, None]))
    return buckets


def extend_bucket(table: Tensor, starts: Sequence[int], new: Sequence[int], prefix: Sequence[int]) -> LengthBucket:
    """Return a bucket of requests with new tokens after a cached prefix.

    ``starts``, ``new`` and ``prefix`` have one entry per request: the row of its first new token in the packed batch, its number
    of new tokens, and its number of cached tokens. ``table`` [b, max_len] contains the page-table rows of the requests.
    """
    q = torch.arange(max(new))[None]
    new_b1, prefix_b1 = torch.tensor(new)[:, None], torch.tensor(prefix)[:, None]
    valid_bQ = q < new_b1
    tokens_bQ = torch.tensor(starts)[:, None] + torch.where(valid_bQ, q, 0)
    slots_bL, _ = padded_slots(table, [n + p for n, p in zip(new, prefix, strict=True)])
    last_bQ = prefix_b1 + torch.minimum(q, new_b1 - 1)  # padded queries attend like the last one, so they stay finite
    visible_bQL = torch.arange(slots_bL.shape[1])[None, None] <= last_bQ[:, :, None]
    return LengthBucket(tokens_bQ, valid_bQ, slots_bL, visible_bQL)


def extend_buckets(table: Tensor, new: Sequence[int], prefix: Sequence[int]) -> list[LengthBucket]:
    """Return buckets for a prefill of ``new[i]`` packed tokens of request i after ``prefix[i]`` cached tokens.

    ``table`` [B, max_len] contains the page-table rows of the batch. Requests without new tokens are left out.
    """
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    groups: dict[tuple[int, int], list[int]] = {}
    for row, count in enumerate(new):
        if count > 0:
            groups.setdefault((length_class(count), length_class(count + prefix[row])), []).append(row)
    buckets: list[LengthBucket] = []
    for members in groups.values():
        area = max(new[row] for row in members) * max(new[row] + prefix[row] for row in members)
        num_requests = max(1, MASK_ELEMENTS // area)
        for first in range(0, len(members), num_requests):
            part = members[first : first + num_requests]
            rows = torch.tensor(part)
            lens = [new[row] for row in part], [prefix[row] for row in part]
            buckets.append(extend_bucket(table[rows], [starts[row] for row in part], *lens))
    return buckets


class BatchedAttention(AttentionBackend):
    """Causal self-attention with a paged KV pool. Other kinds of layers are not supported."""

    def __init__(self, runner: Any, kernels: CKernels | None = None) -> None:
        """Decode with ``kernels`` if given; prefill always uses torch."""
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.buckets: list[LengthBucket] = []
        self._workspace: dict[tuple[str, torch.dtype], Tensor] = {}
        self._c = kernels

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Sort the requests of this forward into buckets, except for decoding in C, which reads the page table."""
        self.buckets = []
        decode = forward_batch.forward_mode.is_decode()
        if forward_batch.forward_mode.is_idle() or (decode and self._c is not None):
            return
        rows = forward_batch.req_pool_indices[: forward_batch.batch_size].long()
        table = self.req_to_token_pool.req_to_token[rows]
        if decode:
            seq_lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
            self.buckets = decode_buckets(table, seq_lens[: forward_batch.batch_size].tolist())
        else:
            new = list(forward_batch.extend_seq_lens_cpu)[: forward_batch.batch_size]
            prefix = list(forward_batch.extend_prefix_lens_cpu)[: forward_batch.batch_size]
            self.buckets = extend_buckets(table, new, prefix)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        if unsupported := [name for name, value in options.items() if value is not None and value is not False]:
            raise NotImplementedError(
                f"{ATTENTION}: layer {layer.layer_id} has attention with {', '.join(unsupported)}, which engines on a CPU do not "
                "support: set placement.device=cuda, or use another model"
            )
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    forward_decode = forward_extend

    def support_triton(self) -> Any:
        return False

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding request. Padding requests make the batches of all ranks equally large."""
        return 1

    get_cuda_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value

    @staticmethod
    def require_plain(layer: Any) -> None:
        """Raise ``NotImplementedError`` unless ``layer`` is causal self-attention over all tokens.

        Its scores must not be capped or rescaled, and its keys and values must have the same size per head.
        """
        is_causal = not layer.is_cross_attention and layer.attn_type is AttentionType.DECODER
        sees_all = layer.sliding_window_size == -1 and not layer.use_irope
        plain_scores = not layer.logit_cap and layer.xai_temperature_len <= 0
        if not (is_causal and sees_all and plain_scores) or layer.qk_head_dim != layer.v_head_dim:
            raise NotImplementedError(
                f"{ATTENTION}: layer {layer.layer_id} is not plain causal self-attention, the only kind that engines on a CPU "
                "support: set placement.device=cuda, or use another model"
            )

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """Return attention [T, H * D] of q [T, H * D] to the keys and values in the pool.

        If ``save_kv_cache``, first store the new k and v [T, K * D] there. Otherwise k and v are not read.
        """
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        q_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self.attend(q_THD, self._pools(layer), layer.scaling, forward_batch).reshape(len(q_THD), -1)

    def _pools(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer in this rank's pool, [rows, K, D]."""
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def attend(self, q_THD: Tensor, pools: tuple[Tensor, Tensor], scale: float, forward_batch: Any) -> Tensor:
        """Return attention [T, H, D] of each query to its request's tokens up to itself, from ``pools`` (keys, values)."""
        if self._c is None or not forward_batch.forward_mode.is_decode():
            return self._attend_over(self.buckets, q_THD, *pools, scale)
        table, rows_B = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        return self._c.attention(q_THD.contiguous(), pools, table, rows_B, forward_batch.seq_lens, scale)

    def _attend_over(
        self, buckets: list[LengthBucket], q_THD: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Return attention [T, H, D] of ``q_THD``, computed bucket by bucket."""
        if len(buckets) == 1 and buckets[0].tokens_bQ is None:
            return self._attend(buckets[0], q_THD[:, None], keys, values, scale).view_as(q_THD)
        out_THD = torch.zeros_like(q_THD)
        for bucket in buckets:
            assert bucket.tokens_bQ is not None
            o_bQHD = self._attend(bucket, q_THD[bucket.tokens_bQ], keys, values, scale)
            if bucket.valid_bQ is None:
                out_THD[bucket.tokens_bQ] = o_bQHD
            else:
                out_THD[bucket.tokens_bQ[bucket.valid_bQ]] = o_bQHD[bucket.valid_bQ]
        return out_THD

    def _attend(self, bucket: LengthBucket, q_bQHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return attention [b, Q, H, D] of q [b, Q, H, D] to the KV pool [slots, K, D]."""
        folded_queries, k_bKLD, v_bKLD = self._folded(bucket, q_bQHD, keys, values)
        mask = bucket.mask(q_bQHD.dtype, q_bQHD.shape[2] // keys.shape[1])
        out = F.scaled_dot_product_attention(folded_queries, k_bKLD, v_bKLD, attn_mask=mask, scale=scale)
        return self._unfolded(out, q_bQHD.shape[1])

    def _folded(
        self, bucket: LengthBucket, q_bQHD: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b, K, G * Q, D], keys and values [b, K, L, D] of a bucket."""
        b, q, heads, dim = q_bQHD.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        folded = q_bQHD.view(b, q, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * q, dim)
        k_bLKD, v_bLKD = self._gathered(bucket, keys, values)
        return folded, k_bLKD.transpose(1, 2), v_bLKD.transpose(1, 2)

    def _gathered(self, bucket: LengthBucket, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, L, K, D] of a bucket."""
        return self._gather("k", keys, bucket.slots_bL), self._gather("v", values, bucket.slots_bL)

    @staticmethod
    def _unfolded(out_bKRD: Tensor, q: int) -> Tensor:
        """Return the results of ``_folded`` queries, [b, K, G * Q, D], in the shape [b, Q, H, D]."""
        b, kv_heads, rows, dim = out_bKRD.shape
        return out_bKRD.view(b, kv_heads, rows // q, q, dim).permute(0, 3, 1, 2, 4).reshape(b, q, -1, dim)

    def _gather(self, tag: str, pool: Tensor, slots_bL: Tensor) -> Tensor:
        """Return rows of the pool as [b, L, K, D], in memory that the next call with the same ``tag`` overwrites.

        Reusing it is cheaper than faulting in new pages, which costs more than the copy itself.
        """
        key, size = (tag, pool.dtype), slots_bL.numel() * pool[0].numel()
        workspace = self._workspace.get(key)
        if workspace is None or workspace.numel() < size:
            workspace = self._workspace[key] = torch.empty(size + size // 4, dtype=pool.dtype)
        rows = workspace[:size].view(slots_bL.numel(), *pool.shape[1:])
        torch.index_select(pool, 0, slots_bL.reshape(-1), out=rows)
        return rows.view(*slots_bL.shape, *pool.shape[1:])


def require_plain_layers(model: torch.nn.Module) -> None:
    """Raise ``NotImplementedError`` unless every attention layer of ``model`` passes ``require_plain``."""
    for layer in model.modules():
        if isinstance(layer, RadixAttention):
            BatchedAttention.require_plain(layer)
