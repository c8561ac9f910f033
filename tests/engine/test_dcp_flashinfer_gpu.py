"""FlashInfer attention over a cache split by hand into ranks, on one GPU: its log-sum-exp, merges, plans and graphs."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slime_like_plugins.dcp.merge import merge
from tests.engine.dcp_case import WIDTH, Pool, ShardedCase, ThreadGroup, by_threads, sharded_case
from tests.engine.flashinfer_case import RowsKernel, build_ranks, set_context, stub_batch, stub_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DTYPE, DIM = torch.bfloat16, 128
TOLERANCE = 2e-2  # bfloat16 outputs of each rank, merged in float32, against float64
REQUESTS = [(1, 0), (7, 0), (3, 40), (20, 1), (1, 63)]  # new tokens, cached tokens


def on_gpu(case: ShardedCase) -> list[Pool]:
    """Return the case's pools on the GPU in bfloat16; round its queries, keys and values to bfloat16 in place."""
    pools = case.pools()
    for pool in pools:
        pool.keys, pool.values = (t.nan_to_num(0).to("cuda", DTYPE) for t in (pool.keys, pool.values))
    case.q_THD, case.keys, case.values = (t.to(DTYPE).float() for t in (case.q_THD, case.keys, case.values))
    return pools


def check(out: Tensor, case: ShardedCase) -> None:
    torch.testing.assert_close(out.double().cpu(), case.exact(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_decode_split_by_hand(size: int, tensor_cores: bool) -> None:
    """The log-sum-exp of FlashInfer has base 2, and each rank's rows are those of SGLang's kernel."""
    flashinfer = pytest.importorskip("flashinfer")
    from sglang.srt.layers.dcp import create_triton_kv_indices_for_dcp_triton, get_dcp_lens

    case = sharded_case(
        [(1, 8 + 5 * i) for i in range(5)], size, 8 // size if tensor_cores else 1, decode=True, dim=DIM
    )
    heads = case.q_THD.shape[1]
    pools, outs, lses = on_gpu(case), [], []
    for rank, pool in enumerate(pools):  # the token of this step is cached before attention
        own_mask = case.fresh_L & (case.slots_L % size == rank)
        rows = (case.slots_L[own_mask] // size).cuda()
        pool.keys[rows], pool.values[rows] = (t[own_mask][:, None].to("cuda", DTYPE) for t in (case.keys, case.values))
        local = get_dcp_lens(torch.tensor(case.total), size, rank)
        indptr = torch.zeros(len(local) + 1, dtype=torch.int32)
        indptr[1:] = local.cumsum(0)
        expected = torch.zeros(int(indptr[-1]), dtype=torch.int32)
        arguments = (case.table, case.rows, local, indptr)
        RowsKernel()[(len(local),)](*arguments, None, expected, WIDTH, size, rank)
        rows_on_gpu = torch.zeros_like(expected, device="cuda")
        tables, kernel = [t.cuda() for t in arguments[:4]], cast(Any, create_triton_kv_indices_for_dcp_triton)
        kernel[(len(local),)](*tables, None, rows_on_gpu, WIDTH, size, rank)
        assert rows_on_gpu.tolist() == expected.tolist()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"),
            "NHD",
            use_tensor_cores=tensor_cores,
            backend="fa2",
        )
        last = torch.ones(len(local), dtype=torch.int32, device="cuda")
        wrapper.plan(indptr.cuda(), rows_on_gpu, last, heads, 1, DIM, 1, q_data_type=DTYPE, kv_data_type=DTYPE)
        out, lse = wrapper.run(case.q_THD.to("cuda", DTYPE), (pool.keys, pool.values), return_lse=True)
        outs.append(out.float())
        lses.append(lse)
    out, lse = merge(torch.stack(outs), torch.stack(lses), base=2)
    check(out, case)
    for i, (q, k) in enumerate(zip(case.q_THD, case.keys.split(case.total), strict=True)):
        scores = torch.einsum("hd,ld->hl", q.double(), k.double()) * DIM**-0.5
        torch.testing.assert_close(lse[i].double().cpu(), scores.logsumexp(-1), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_backend_of_each_rank(size: int, decode: bool) -> None:
    """The backend agrees with exact attention on FlashInfer and SGLang's kernels, even on ranks without tokens."""
    pytest.importorskip("flashinfer")
    from slime_like_plugins.dcp import flashinfer_attention as backend

    case = sharded_case(REQUESTS, size, 4, decode=decode, dim=DIM)
    group, pools = ThreadGroup(size), on_gpu(case)
    batch, layer = stub_batch(case, "cuda"), stub_layer(4, DIM)
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, backend, group)
        ranks = build_ranks(backend, group, case, pools, "cuda", DTYPE)
        for rank in ranks:
            rank.init_forward_metadata(batch)

        def run(rank: int) -> Tensor:
            q = case.q_THD[:, rank * 4 : (rank + 1) * 4].reshape(len(case.q_THD), -1).to("cuda", DTYPE)
            k, v = (t[case.fresh_L][:, None].to("cuda", DTYPE) for t in (case.keys, case.values))
            method = ranks[rank].forward_decode if decode else ranks[rank].forward_extend
            return method(q, k, v, layer, batch)

        parts = by_threads(group, run)
    check(torch.cat([part.view(len(case.q_THD), 4, DIM) for part in parts], 1), case)


def test_a_captured_graph() -> None:
    """A graph captured with sequences of one token reads the plan of its replay."""
    pytest.importorskip("flashinfer")
    from slime_like_plugins.dcp import flashinfer_attention as backend

    size, count = 2, 4
    case = sharded_case([(1, length) for length in (0, 5, 30, 62)], size, 4, decode=True, dim=DIM)
    group, pools = ThreadGroup(size), on_gpu(case)
    q_TAD, outs, lses = case.q_THD.to("cuda", DTYPE), [], []
    captured_batch: Any = stub_batch(sharded_case([(1, 0)] * count, size, 4, decode=True, dim=DIM), "cuda")
    captured_batch.req_pool_indices = torch.zeros(count, dtype=torch.int64, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, backend, group)
        patch.setattr(ThreadGroup, "all_gather", lambda self, tensor, dim: tensor)  # q_TAD is complete
        for rank, attention in enumerate(build_ranks(backend, group, case, pools, "cuda", DTYPE)):
            own_mask = case.fresh_L & (case.slots_L % size == rank)
            rows = (case.slots_L[own_mask] // size).cuda()
            pools[rank].keys[rows], pools[rank].values[rows] = (
                t[own_mask][:, None].to("cuda", DTYPE) for t in (case.keys, case.values)
            )
            attention.init_cuda_graph_state(count, count)
            attention.init_forward_metadata_out_graph(captured_batch, in_capture=True)
            wrapper, layer = attention.forward_metadata.decode_wrappers[0], stub_layer(4, DIM)
            indptr = attention.kv_indptr[0][: count + 1]
            attend = lambda: attention._attend_rows(wrapper, q_TAD, layer, indptr[1:] == indptr[:-1])  # noqa: B023, E731
            attend()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, lse = attend()
            attention.init_forward_metadata_out_graph(stub_batch(case, "cuda"))
            graph.replay()
            torch.cuda.synchronize()
            outs.append(out.float())
            lses.append(lse)
    assert any(bool((lse == -math.inf).any()) for lse in lses)  # a rank has no token of the first request
    check(merge(torch.stack(outs), torch.stack(lses))[0], case)
