"""Plans of FlashInfer's attention kernels for one rank of a DCP group, as ``flashinfer_attention`` uses them."""

from __future__ import annotations

from typing import Any, Protocol

from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.dcp import create_triton_kv_indices_for_dcp_triton, get_dcp_lens
from torch import Tensor

from slime_like.config.schema.dcp import SHARDED_FLASHINFER

upstream: Any = flashinfer_backend  # names that it imports from flashinfer exist only if flashinfer is installed


class GroupRank(Protocol):
    """Rank of a DCP group."""

    size: int  # number of ranks in the group
    rank: int


class ShardedReads:
    """Wrapper around SGLang's page table reader that returns only the rows of one rank's tokens."""

    def __init__(self, translator: Any, table: Tensor, size: int, rank: int) -> None:
        """Wrap the reader ``translator`` for rank ``rank`` of a group of ``size`` ranks.

        ``table`` contains the slots of all tokens, [requests, context].
        """
        self._translator, self._table, self._size, self._rank = translator, table, size, rank

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of SGLang's reader."""
        return getattr(self._translator, name)

    def pack_read_stream(
        self,
        plan: Any,
        *,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        indptr: Tensor,
        out: Tensor,
        kv_start_idx: Tensor | None = None,
        kind: Any = None,
    ) -> bool:
        """Write the rows of request i to ``out[indptr[i] : indptr[i + 1]]``.

        ``seq_lens`` counts this rank's tokens only. Return True, because the rows need no translation. Raises
        ``NotImplementedError`` if attention does not begin at the first token of a sequence.
        """
        if kv_start_idx is not None:
            raise NotImplementedError(
                f"{SHARDED_FLASHINFER} does not support attention that begins after a sequence's first token: set rollout.dcp=1"
            )
        if len(seq_lens):
            kernel: Any = create_triton_kv_indices_for_dcp_triton
            kernel[(len(seq_lens),)](
                self._table,
                req_pool_indices,
                seq_lens,
                indptr,
                None,
                out,
                self._table.stride(0),
                self._size,
                self._rank,
            )
        return True


class ShardedDecodePlans(upstream.FlashInferIndicesUpdaterDecode):
    """Plans for decode steps over this rank's tokens, with the query heads of the whole group."""

    def __init__(self, runner: Any, backend: GroupRank) -> None:
        super().__init__(runner, backend)
        self.num_qo_heads *= backend.size
        self._size, self._rank = backend.size, backend.rank

    def call_begin_forward(
        self,
        wrapper: Any,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        kv_indptr: Tensor,
        kv_start_idx: Tensor | None,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
        **options: Any,
    ) -> None:
        """Plan one wrapper for sequences of ``paged_kernel_lens`` tokens, of which this rank holds a part."""
        lens = get_dcp_lens(paged_kernel_lens, self._size, self._rank)
        if seq_lens_cpu is not None:
            seq_lens_cpu = get_dcp_lens(seq_lens_cpu, self._size, self._rank)
            paged_kernel_lens_sum = max(1, int(seq_lens_cpu.sum()))  # rows to allocate: FlashInfer gets no empty tensor
        super().call_begin_forward(
            wrapper, lens, paged_kernel_lens_sum, kv_indptr, kv_start_idx, spec_info, seq_lens_cpu, **options
        )


class ShardedPrefillPlans(upstream.FlashInferIndicesUpdaterPrefill):
    """Plans for the two parts of attention in a prefill.

    One part is attention to this rank's tokens of the cached prefixes, with the query heads of the whole group; the other is
    attention among the new tokens, with this rank's heads.
    """

    def __init__(self, runner: Any, backend: GroupRank) -> None:
        super().__init__(runner, backend)
        self._num_new_heads = self.num_qo_heads
        self.num_qo_heads *= backend.size
        self._size, self._rank = backend.size, backend.rank

    def call_begin_forward(  # noqa: PLR0913 (SGLang's signature)
        self,
        wrapper_ragged: Any,
        wrapper_paged: Any,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        seq_lens: Tensor,
        prefix_lens: Tensor | None,
        kv_start_idx: Tensor | None,
        kv_indptr: Tensor,
        qo_indptr: Tensor,
        use_ragged: bool,
        spec_info: Any,
        **options: Any,
    ) -> None:
        """Plan both wrappers; ``paged_kernel_lens`` are the lengths of the cached prefixes.

        Raises ``NotImplementedError`` if ``spec_info`` or a custom mask is given, or the ragged wrapper is not used.
        """
        if not use_ragged or spec_info is not None or options.get("cross_attention_custom_mask") is not None:
            raise NotImplementedError(
                f"{SHARDED_FLASHINFER} does not support a prefill with a custom mask or without the ragged wrapper: set rollout.dcp=1"
            )
        super().call_begin_forward(
            wrapper_ragged,
            wrapper_paged,
            req_pool_indices,
            get_dcp_lens(paged_kernel_lens, self._size, self._rank),
            paged_kernel_lens_sum,
            seq_lens,
            prefix_lens,
            kv_start_idx,
            kv_indptr,
            qo_indptr,
            False,  # SGLang would plan the ragged wrapper with the heads of the group
            spec_info,
            **options,
        )
        new_indptr = qo_indptr[: len(seq_lens) + 1]
        wrapper_ragged.begin_forward(
            new_indptr, new_indptr, self._num_new_heads, self.num_kv_heads, self.head_dim, q_data_type=self.q_data_type
        )
