"""Attention over a KV cache sharded over ranks: partial results, merges, and all steps with threads as ranks."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.dcp.merge import merge
from slime_like_plugins.sglang_cpu import build
from slime_like_plugins.sglang_cpu.kernels import CKernels
from tests.engine.c_kernels import C, needs_compiler
from tests.engine.dcp_case import DIM, ThreadGroup, by_threads, sharded_case
from tests.hypothesis_examples import num_examples

IN_C = st.booleans() if any(shutil.which(name) for name in build.COMPILERS) else st.just(False)


def normal(seed: int, *shape: int) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("base", [math.e, 2.0])
@settings(max_examples=num_examples(80))
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    scale=st.sampled_from([0.1, 1.0, 40.0, 3e4]),
    seed=st.integers(0, 99),
)
def test_merged_parts_are_the_softmax_of_all_keys(base: float, counts: list[int], scale: float, seed: int) -> None:
    """Parts without keys (log-sum-exp -inf) have no weight."""
    tokens, heads, dim, total = 3, 2, 4, sum(counts)
    scores = (scale * normal(seed, tokens, heads, total)).double()
    values = normal(seed + 1, total, dim).double()
    outs, lses = [], []
    for keys in torch.arange(total).split(counts):
        part = scores[..., keys]
        outs.append(torch.softmax(part, -1).float() @ values[keys].float() if len(keys) else torch.zeros(3, 2, dim))
        lses.append(torch.logsumexp(part, -1).div(math.log(base)).float())
    out, lse = merge(torch.stack(outs), torch.stack(lses), base=base)
    exact = torch.softmax(scores, -1) @ values
    # A log-sum-exp of x has an error of about x * 2^-24, which is the relative error of the weights.
    tolerance = 2e-6 + 4 * float(scores.abs().max()) * 2**-24
    torch.testing.assert_close(out.double(), exact, atol=4 * tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=tolerance, rtol=1e-6)


def test_a_token_without_any_key_gets_nothing() -> None:
    out, lse = merge(torch.zeros(2, 1, 1, 3), torch.full((2, 1, 1), -math.inf))
    assert not out.any() and lse.item() == -math.inf


@needs_compiler
@settings(max_examples=num_examples(60))
@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (7, 1), (16, 1)]),
    dim=st.sampled_from([1, 8, 18, 32, 40, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_c_kernel_returns_log_sum_exp(
    lens: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """Outputs are float32 for bfloat16 inputs too; requests without keys get zeros and a log-sum-exp of -inf."""
    queries, kv = heads
    q = normal(dim, len(lens), queries, dim).to(dtype)
    keys, values = (normal(seed, 400, kv, dim).to(dtype) for seed in (1, 2))
    table = torch.full((len(lens), max(lens)), 10**6, dtype=torch.int32)
    pages = torch.randperm(400, generator=torch.Generator().manual_seed(sum(lens)))[: sum(lens)].split(lens)
    for row, page in enumerate(pages):
        table[row, : len(page)] = page.int()
    rows = torch.arange(len(lens))
    out, lse = C().partial_attention(q, (keys, values), table, rows, torch.tensor(lens), dim**-0.5)
    assert out.dtype is lse.dtype is torch.float32
    for i, page in enumerate(pages):
        k, v = (t[page].double().repeat_interleave(queries // kv, 1) for t in (keys, values))
        scores = torch.einsum("hd,lhd->hl", q[i].double(), k) * dim**-0.5
        exact = torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), v)
        torch.testing.assert_close(out[i].double(), exact, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(lse[i].double(), torch.logsumexp(scores, -1), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["ag_rs", "a2a"])
@settings(max_examples=num_examples(40))
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=6),
    size=st.integers(2, 4),
    heads=st.integers(1, 5),
    decode=st.booleans(),
    in_c=IN_C,
)
def test_any_mix_of_lengths_over_ranks(
    form: str, requests: list[tuple[int, int]], size: int, heads: int, decode: bool, in_c: bool
) -> None:
    """Sequences shorter than the group leave ranks without tokens; prefixes need not end at a page."""
    from slime_like_plugins.dcp import attention

    case = sharded_case(requests, size, heads, decode=decode)
    group, pools, num_new = ThreadGroup(size), case.pools(), sum(case.new)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decode)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(case.new),
        req_pool_indices=case.rows,
        seq_lens=torch.tensor(case.total),
        seq_lens_cpu=torch.tensor(case.total),
        extend_seq_lens_cpu=case.new,
        extend_prefix_lens_cpu=case.prefix,
        out_cache_loc=case.slots_L[case.fresh_L],
    )
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, tp_k_head_num=1, qk_head_dim=DIM, v_head_dim=DIM)
    layer.scaling = DIM**-0.5
    parallel = SimpleNamespace(dcp_group=group, attn_dcp_size=size, dcp_comm_backend=form, dcp_replicate_q_proj=False)
    releases: list[int] = []  # ranks that released the hidden states of a prefill

    def run(rank: int) -> Tensor:
        table = SimpleNamespace(req_to_token=case.table)
        runner = SimpleNamespace(req_to_token_pool=table, token_to_kv_pool=pools[rank])
        backend = attention.ShardedAttention(runner, CKernels(build.build().path) if in_c else None)  # with own buffers
        backend._rank = rank
        if not decode:
            queries: Any = SimpleNamespace(release=lambda: releases.append(rank))
            backend._queries = {0: queries}
        backend.init_forward_metadata(batch)
        q = case.q_THD[:, rank * heads : (rank + 1) * heads].reshape(num_new, -1)
        return backend.forward_extend(q, case.keys[case.fresh_L], case.values[case.fresh_L], layer, batch)

    with pytest.MonkeyPatch.context() as patch:
        parallel.attn_dcp_rank = 0
        patch.setattr(attention, "get_parallel", lambda: parallel)
        out = torch.cat([part.view(num_new, heads, DIM) for part in by_threads(group, run)], 1)
    torch.testing.assert_close(out.double(), case.exact(), atol=3e-6, rtol=1e-5)
    assert sorted(releases) == ([] if decode else list(range(size)))
    for rank, pool in enumerate(pools):  # each token is stored once
        assert int(pool.keys.isfinite().all(-1).sum()) == int((case.slots_L % size == rank).sum())


class Rope:
    """Rotary embedding that adds the position."""

    def __call__(self, positions_T: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + positions_T[:, None], k + positions_T[:, None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_rank_computes_the_queries_of_its_group(bias: bool, normed: bool) -> None:
    """Compare at the start, after a push, and with a new parameter; no hidden states are kept after an attention.

    A push overwrites the projections in place, and torch's version counter does not count the loader's write.
    """
    from slime_like_plugins.dcp import exchange_time
    from slime_like_plugins.dcp.group_queries import group_queries

    size, heads, hidden = 3, 2, 8
    group, hidden_TC, positions_T = ThreadGroup(size), normal(1, 5, hidden), torch.arange(5) + 7
    measured_ranks: list[int] = []  # the rank of each measured exchange

    @contextlib.contextmanager
    def running() -> Generator[None]:
        measured_ranks.append(group.rank_in_group)
        yield

    clock: Any = SimpleNamespace(running=running)
    norm = torch.nn.RMSNorm(DIM) if normed else None
    models: list[torch.nn.Module] = []
    for rank in range(size):
        torch.manual_seed(rank)
        attention: Any = torch.nn.Module()
        attention.qkv_proj = torch.nn.Linear(hidden, (heads + 2) * DIM, bias)
        attention.q_norm, attention.rotary_emb = norm, Rope()
        attention.attn, attention.head_dim = SimpleNamespace(layer_id=4), DIM
        attention.q_size, attention.kv_size = heads * DIM, DIM
        models.append(attention)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        """Return the gathered queries and those that the rank computes, stacked over the three stages."""
        module: Any = models[rank]
        queries = group_queries(module, group)[4]
        results: list[tuple[Tensor, Tensor]] = []
        for push in range(3):
            q = module.qkv_proj(hidden_TC)[:, : heads * DIM].reshape(-1, DIM)
            own_queries, _ = module.rotary_emb(
                positions_T, (q if norm is None else norm(q)).view(5, -1), torch.zeros(5, DIM)
            )
            results.append((group.all_gather(own_queries.view(5, heads, DIM), dim=1), queries(positions_T)))
            assert queries._hidden_TC is None
            if push == 1:  # a parameter with other values whose version counter is not smaller
                version = module.qkv_proj.weight._version
                module.qkv_proj.weight = torch.nn.Parameter(normal(20 + rank, (heads + 2) * DIM, hidden))
                while module.qkv_proj.weight._version < version:
                    module.qkv_proj.weight.mul_(1)
                continue
            for seed, parameter in enumerate(module.qkv_proj.parameters(), 10 + 2 * rank):
                parameter.fill_(math.nan)
                parameter.data.copy_(normal(seed, *parameter.shape))
        return tuple(torch.stack(tensors) for tensors in zip(*results, strict=True))  # pyright: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_time, "_clocks", [])
        patch.setattr(exchange_time, "METHODS", ["all_gather"])
        exchange_time.measure(group, clock)
        results = by_threads(group, run)
    for gathered_queries, computed_queries in results:
        torch.testing.assert_close(computed_queries, gathered_queries, atol=2e-6, rtol=1e-5)
    assert sorted(measured_ranks) == sorted([*range(size)] * 3), "gathered projections are not an exchange of attention"


@pytest.mark.parametrize(
    ("gated", "norm_size", "reason"),
    [
        (False, DIM, None),
        (True, DIM, "also computes output gates"),
        (False, 2 * DIM, "the query norm of this model is over the heads of all ranks"),
    ],
)
def test_projections_that_a_rank_cannot_replicate_stop_the_engine(
    gated: bool, norm_size: int, reason: str | None
) -> None:
    """An engine started by hand has no config that rejects them."""
    from slime_like_plugins.dcp.group_queries import group_queries

    attention: Any = torch.nn.Module()
    attention.attn, attention.head_dim = SimpleNamespace(layer_id=0), DIM
    attention.q_size, attention.kv_size = 2 * DIM, DIM
    attention.qkv_proj = torch.nn.Linear(8, (4 + 2 * gated) * DIM)
    attention.q_norm = torch.nn.RMSNorm(norm_size)
    if reason is None:
        assert list(group_queries(attention, None)) == [0]
        return
    with pytest.raises(
        SystemExit, match=rf"^slime_like plugin 'dcp': .*{reason}.*; set rollout\.dcp_replicate_q=false"
    ):
        group_queries(attention, None)
