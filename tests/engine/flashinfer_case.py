"""FlashInfer backend of a DCP rank without an engine: SGLang's backend with a stub of the model runner.

``WRAPPERS`` compute FlashInfer's attention in torch, with its interface and its log-sum-exp of base 2, and return NaN
where FlashInfer leaves its outputs undefined.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like_plugins.dcp.merge import all_to_all
from tests.engine.dcp_case import WIDTH, Pool, ShardedCase, ThreadGroup


def attend(q_QHD: Tensor, k_LD: Tensor, v_LD: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, D] to one KV head and log-sum-exp of base 2 [Q, H]; NaN without keys."""
    if not len(k_LD):
        return torch.full_like(q_QHD, math.nan), torch.full(q_QHD.shape[:2], math.nan)
    scores = torch.einsum("qhd,ld->qhl", q_QHD, k_LD) * scale
    if causal:
        later_QL = torch.arange(len(k_LD)) > len(k_LD) - len(q_QHD) + torch.arange(len(q_QHD))[:, None]
        scores = scores.masked_fill(later_QL[:, None], -math.inf)
    return torch.einsum("qhl,ld->qhd", scores.softmax(-1), v_LD), scores.logsumexp(-1) / math.log(2)


class TorchPaged:
    """Fake wrapper for decode or prefill over rows of a pool. With CUDA graphs, it reads its buffers when it runs."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        self.use_tensor_cores = options.get("use_tensor_cores")
        self.is_cuda_graph_enabled = bool(options.get("use_cuda_graph"))
        self._indptr = options.get("paged_kv_indptr_buffer")
        self._paged_kv_indices_buf = options.get("paged_kv_indices_buffer")
        self._custom_mask_buf = None

    def _plan(self, qo_indptr: Tensor, indptr: Tensor, rows: Tensor, heads: tuple[int, int, int]) -> None:
        assert len(rows)  # FlashInfer gets no empty tensor
        self._qo_indptr, self._heads = qo_indptr.clone(), heads
        if self.is_cuda_graph_enabled:
            assert self._indptr is not None and self._paged_kv_indices_buf is not None
            self._indptr[: len(indptr)] = indptr
            self._paged_kv_indices_buf[: len(rows)] = rows
        else:
            self._indptr, self._paged_kv_indices_buf = indptr.clone(), rows.clone()

    def forward_return_lse(
        self, q: Tensor, pools: tuple[Tensor, Tensor], *, sm_scale: float, causal: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert self._heads == (q.shape[1], pools[0].shape[1], q.shape[2]) and not causal
        assert self._indptr is not None and self._paged_kv_indices_buf is not None
        out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan)
        tokens, rows = pairwise(self._qo_indptr.tolist()), pairwise(self._indptr.tolist())
        for (first, last), (begin, end) in zip(tokens, rows, strict=False):
            keys, values = (pool[self._paged_kv_indices_buf[begin:end].long(), 0] for pool in pools)
            out[first:last], lse[first:last] = attend(q[first:last], keys, values, sm_scale, causal=False)
        return out, lse


class TorchDecode(TorchPaged):
    """``BatchDecodeWithPagedKVCacheWrapper`` in torch."""

    def begin_forward(
        self, indptr: Tensor, rows: Tensor, last: Tensor, heads: int, kv: int, dim: int, page: int, **options: Any
    ) -> None:
        assert page == 1
        self._plan(torch.arange(len(indptr)), indptr, rows, (heads, kv, dim))


class TorchPrefill(TorchPaged):
    """``BatchPrefillWithPagedKVCacheWrapper`` in torch."""

    def begin_forward(
        self,
        qo: Tensor,
        indptr: Tensor,
        rows: Tensor,
        last: Tensor,
        *shape: int,
        **options: Any,
    ) -> None:
        heads, kv, dim, page = shape
        assert page == 1 and options["custom_mask"] is None
        self._plan(qo, indptr, rows, (heads, kv, dim))


class TorchRagged:
    """``BatchPrefillWithRaggedKVCacheWrapper`` in torch."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"

    def begin_forward(self, qo: Tensor, kv_indptr: Tensor, heads: int, kv: int, dim: int, **options: Any) -> None:
        self._indptr, self._heads = qo.clone(), (heads, kv, dim)

    def forward_return_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert self._heads == (q.shape[1], k.shape[1], q.shape[2]) and causal
        parts = [
            attend(q[first:last], k[first:last, 0], v[first:last, 0], sm_scale, causal=True)
            for first, last in pairwise(self._indptr.tolist())
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self.forward_return_lse(*tensors, **options)[0]


def fast_decode_plan(
    wrapper: TorchDecode,
    indptr: Tensor,
    rows: Tensor,
    *shape: Any,
    global_override_indptr_cpu: Tensor | None,
    **options: Any,
) -> None:
    """Plan the replay of a graph like FlashInfer's function; check the lengths on the host, if they are passed."""
    assert global_override_indptr_cpu is None or global_override_indptr_cpu.tolist() == indptr.tolist()
    TorchDecode.begin_forward(wrapper, indptr, rows, *shape, **options)


WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": TorchDecode,
    "BatchPrefillWithPagedKVCacheWrapper": TorchPrefill,
    "BatchPrefillWithRaggedKVCacheWrapper": TorchRagged,
    "fast_decode_plan": fast_decode_plan,
}


class RowsKernel:
    """``create_triton_kv_indices_for_dcp_triton`` in Python: rows of a rank's tokens, one by one."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(table: Tensor, requests: Tensor, lens: Tensor, indptr: Tensor, start: None, out: Tensor, *last: int):
            _, size, rank = last
            for request in range(grid[0]):
                for index in range(int(lens[request])):
                    slot = int(table[requests[request], rank + index * size])
                    out[int(indptr[request]) + index] = slot // size

        return run


class OnDevice:
    """Proxy of ``torch`` for SGLang's module, which creates tensors on ``device`` instead of "cuda"."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name not in ("empty", "zeros"):
            return function
        return lambda *shape, **options: function(*shape, **options | {"device": self._device})


def use_torch(patch: pytest.MonkeyPatch, backend: Any, group: ThreadGroup) -> None:
    """Replace FlashInfer, Triton kernels and the all-to-all on GPUs by torch."""
    from slime_like_plugins.dcp import flashinfer_plans

    for name, wrapper in WRAPPERS.items():
        patch.setattr(backend.upstream, name, wrapper, raising=False)
    patch.setattr(backend.upstream, "torch", OnDevice("cpu"))
    patch.setattr(flashinfer_plans, "create_triton_kv_indices_for_dcp_triton", RowsKernel())
    patch.setattr(backend, "dcp_a2a_lse_reduce", lambda out, lse, group, **options: all_to_all(out, lse, group)[0])


def set_context(
    patch: pytest.MonkeyPatch, backend: Any, group: ThreadGroup, exchange: str = "ag_rs", on: str | None = None
) -> None:
    """Make SGLang's context that of the calling thread's rank. ``on``: a feature to enable."""

    def parallel() -> SimpleNamespace:
        size = group.world_size
        return SimpleNamespace(
            dcp_group=group,
            attn_dcp_size=size,
            attn_dcp_rank=group.rank_in_group,
            attn_tp_size=size,
            dcp_comm_backend=exchange,
        )

    features = SimpleNamespace(enable_mis=on == "mis")
    deterministic = SimpleNamespace(enable_deterministic_inference=on == "deterministic")
    algorithm = "EAGLE" if on == "speculative" else None
    for module in (backend, backend.upstream):
        patch.setattr(module, "get_parallel", parallel)
        patch.setattr(module, "get_exec", lambda: SimpleNamespace(features=features, deterministic=deterministic))
    patch.setattr(backend, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    patch.setattr(backend.upstream, "get_platform", lambda: SimpleNamespace(is_sm100=False))
    patch.setattr(backend.upstream, "get_buffer", lambda name, create: create())
    patch.setattr(backend.upstream, "get_cuda_graph_max_batch_size", lambda size: size)
    patch.setattr(backend.upstream, "DllmConfig", SimpleNamespace(from_server_args=lambda args: None))


def stub_runner(case: ShardedCase, pool: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return a stub of a model runner with the attributes that the backend reads."""
    method = SimpleNamespace(resolve_attention_access=lambda phase, name: None, needs_global_scale=lambda: False)
    pool.get_kv_cache_quant_method = lambda: method
    config = SimpleNamespace(
        num_attention_heads=case.q_THD.shape[1],
        get_max_num_attention_heads=lambda: case.q_THD.shape[1],
        get_num_kv_heads=lambda tp, dcp: 1,
        head_dim=case.q_THD.shape[2],
        v_head_dim=case.q_THD.shape[2],
        context_len=WIDTH,
        is_multimodal=True,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
    )
    return SimpleNamespace(
        model_config=config,
        req_to_token_pool=SimpleNamespace(req_to_token=case.table.to(device), size=len(case.table)),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        kv_index_translator=SimpleNamespace(reads_are_translated=False),
        server_args=None,
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype,
        page_size=1,
        sliding_window_size=None,
        is_draft_worker=False,
        use_mla_backend=False,
        init_new_workspace=False,
        prefill_attention_backend_str="flashinfer_dcp",
        decode_attention_backend_str="flashinfer_dcp",
    )


def stub_batch(case: ShardedCase, device: str = "cpu") -> Any:
    """Return a stub of a forward batch with the attributes that the backend reads."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    slots = case.slots_L[case.fresh_L]
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE if case.decode else ForwardMode.EXTEND,
        batch_size=len(case.new),
        req_pool_indices=case.rows.to(device),
        seq_lens=torch.tensor(case.total, device=device),
        seq_lens_cpu=torch.tensor(case.total),
        seq_lens_sum=sum(case.total),
        extend_seq_lens_cpu=case.new,
        extend_prefix_lens=torch.tensor(case.prefix, device=device),
        extend_prefix_lens_cpu=case.prefix,
        positions=torch.zeros(len(slots), dtype=torch.int64, device=device),
        out_cache_loc=slots.to(device),
        out_cache_loc_is_physical=False,
        encoder_lens=None,
        spec_info=None,
        cross_attention_custom_mask=None,
        kv_loc_plan=None,
    )


def stub_layer(heads: int, dim: int) -> Any:
    """Return a causal self-attention layer with one KV head per rank."""
    from sglang.srt.layers.radix_attention import AttentionType

    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=1,
        tp_v_head_num=1,
        head_dim=dim,
        qk_head_dim=dim,
        v_head_dim=dim,
        scaling=dim**-0.5,
        logit_cap=0.0,
        k_scale=None,
        v_scale=None,
        k_scale_float=1.0,
        v_scale_float=1.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
    )


def build_ranks(
    backend: Any,
    group: ThreadGroup,
    case: ShardedCase,
    pools: list[Pool],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Return the backend of each rank, built one at a time because SGLang keeps parts of a plan in a global."""
    ranks: list[Any] = []
    for rank in range(case.size):
        group.enter(rank)
        ranks.append(backend.ShardedFlashInfer(stub_runner(case, pools[rank], device, dtype)))
    return ranks
