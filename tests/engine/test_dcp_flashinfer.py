"""FlashInfer attention of DCP ranks on a CPU, with FlashInfer replaced by torch: rows, plans and merges."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.dcp_case import DIM, WIDTH, ShardedCase, ThreadGroup, by_threads, sharded_case
from tests.engine.flashinfer_case import (
    RowsKernel,
    build_ranks,
    set_context,
    stub_batch,
    stub_layer,
    stub_runner,
    use_torch,
)
from tests.hypothesis_examples import num_examples

REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=6)


def forward(ranks: list[Any], group: ThreadGroup, case: ShardedCase, batch: Any) -> Tensor:
    """Return attention of all heads [T, H, D], computed by all ranks."""
    heads, tokens = case.q_THD.shape[1] // case.size, len(case.q_THD)
    layer = stub_layer(heads, case.q_THD.shape[2])

    def run(rank: int) -> Tensor:
        q = case.q_THD[:, rank * heads : (rank + 1) * heads].reshape(tokens, -1)
        k, v = (t[case.fresh_L][:, None] for t in (case.keys, case.values))
        method = ranks[rank].forward_decode if case.decode else ranks[rank].forward_extend
        return method(q, k, v, layer, batch)

    return torch.cat([part.view(tokens, heads, -1) for part in by_threads(group, run)], 1)


@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
@settings(max_examples=num_examples(25), deadline=None)
@given(requests=REQUESTS, size=st.integers(2, 4), heads=st.integers(1, 5), decode=st.booleans())
def test_any_mix_of_lengths_over_ranks(
    exchange: str, requests: list[tuple[int, int]], size: int, heads: int, decode: bool
) -> None:
    """Decode and prefill agree with exact attention; sequences shorter than the group leave ranks without tokens."""
    from slime_like_plugins.dcp import flashinfer_attention as backend

    case = sharded_case(requests, size, heads, decode=decode)
    group, pools, batch = ThreadGroup(size), case.pools(), stub_batch(case)
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, backend, group, exchange)
        use_torch(patch, backend, group)
        ranks = build_ranks(backend, group, case, pools)
        for rank in ranks:
            rank.init_forward_metadata(batch)
        out = forward(ranks, group, case, batch)
    torch.testing.assert_close(out.double(), case.exact(), atol=3e-6, rtol=1e-5)
    for rank, pool in enumerate(pools):  # each token is stored once
        assert int(pool.keys.isfinite().all(-1).sum()) == int((case.slots_L % size == rank).sum())


@settings(max_examples=num_examples(20), deadline=None)
@given(lens=st.lists(st.integers(1, 40), min_size=3, max_size=3), size=st.integers(2, 4), has_host_lens=st.booleans())
def test_a_graph_reads_the_plan_of_its_replay(lens: list[int], size: int, has_host_lens: bool) -> None:
    """A graph captured with sequences of one token uses the replay's lengths, which FlashInfer may read on the host."""
    from slime_like_plugins.dcp import flashinfer_attention as backend

    case = sharded_case([(1, length - 1) for length in lens], size, 2, decode=True)
    group, batch = ThreadGroup(size), stub_batch(case)
    captured_batch = stub_batch(sharded_case([(1, 0)] * 3, size, 2, decode=True))
    captured_batch.req_pool_indices = torch.zeros(3, dtype=torch.int64)
    captured_batch.seq_lens_cpu = torch.ones(3, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, backend, group)
        use_torch(patch, backend, group)
        ranks = build_ranks(backend, group, case, case.pools())
        for rank in ranks:
            rank.init_cuda_graph_state(3, 3)
            rank.init_forward_metadata_out_graph(captured_batch, in_capture=True)
            wrapper = rank.forward_metadata.decode_wrappers[0]
            assert wrapper.is_cuda_graph_enabled
            if not has_host_lens:
                batch.seq_lens_cpu = None
            rank.init_forward_metadata_out_graph(batch)
        out = forward(ranks, group, case, batch)
    torch.testing.assert_close(out.double(), case.exact(), atol=3e-6, rtol=1e-5)


@settings(max_examples=num_examples(30), deadline=None)
@given(lens=st.lists(st.integers(0, WIDTH), min_size=1, max_size=5), size=st.integers(1, 5), data=st.data())
def test_rows_of_a_rank(lens: list[int], size: int, data: st.DataObject) -> None:
    """Every token of every sequence is read by one rank, in the order of positions, from the row where it is stored."""
    from sglang.srt.layers.dcp import get_dcp_lens

    table = torch.tensor(data.draw(st.permutations(range(WIDTH))))[None] + WIDTH * torch.arange(9)[:, None]
    table = table // size * size + torch.arange(WIDTH) % size  # slot % size == position % size
    requests = torch.tensor(data.draw(st.permutations(range(9))))[: len(lens)]
    expected: dict[tuple[int, int], list[int]] = {}
    for request, length in enumerate(lens):
        for position in range(length):
            rows = expected.setdefault((request, position % size), [])
            rows.append(int(table[requests[request], position]) // size)
    for rank in range(size):
        local = get_dcp_lens(torch.tensor(lens), size, rank)
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
        indptr[1:] = local.cumsum(0)
        out = torch.full((int(indptr[-1]),), -1, dtype=torch.int32)
        RowsKernel()[(len(lens),)](table, requests, local, indptr, None, out, table.stride(0), size, rank)
        for request in range(len(lens)):
            assert out[indptr[request] : indptr[request + 1]].tolist() == expected.get((request, rank), [])


def test_plans_have_the_heads_of_the_group() -> None:
    """FlashInfer chooses tensor cores by the query heads per KV head, which DCP multiplies by the size of the group."""
    from slime_like_plugins.dcp import flashinfer_attention as backend

    case, group = sharded_case([(3, 5)], 2, 3, decode=False), ThreadGroup(2)
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, backend, group)
        use_torch(patch, backend, group)
        group.enter(0)
        rank = backend.ShardedFlashInfer(stub_runner(case, case.pools()[0], dtype=torch.bfloat16))
    assert rank.indices_updater_decode.num_qo_heads == rank.indices_updater_prefill.num_qo_heads == 6
    assert rank.decode_use_tensor_cores and rank.decode_wrappers[0].use_tensor_cores  # 6 query heads, 3 without DCP


# name -> (changes of the runner, enabled feature of its context, words of the refusal)
REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "latent attention": ({"use_mla_backend": True}, None, "multi-head latent attention"),
    "windows": ({"sliding_window_size": 128}, None, "sliding windows"),
    "cross attention": ({"is_encoder_decoder": True}, None, "cross attention and its custom masks"),
    "drafts": ({}, "speculative", "speculative decoding"),
    "multi-item scoring": ({}, "mis", "multi-item scoring"),
    "deterministic": ({}, "deterministic", "enable_deterministic_inference"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_arguments_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.dcp import flashinfer_attention as backend

    changes, feature, words = REFUSED[name]
    case = sharded_case([(1, 1)], 2, 1, decode=True)
    runner = stub_runner(case, case.pools()[0])
    for key, value in changes.items():
        setattr(runner.model_config if hasattr(runner.model_config, key) else runner, key, value)
    set_context(monkeypatch, backend, ThreadGroup(2), on=feature)
    with pytest.raises(NotImplementedError, match=f"does not support {re.escape(words)}.*set rollout.dcp=1"):
        backend.ShardedFlashInfer(runner)


def test_a_machine_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.dcp import flashinfer_attention as backend

    case = sharded_case([(1, 1)], 2, 1, decode=True)
    set_context(monkeypatch, backend, ThreadGroup(2))
    monkeypatch.delattr(backend.upstream, "BatchDecodeWithPagedKVCacheWrapper", raising=False)
    with pytest.raises(NotImplementedError, match="needs the package flashinfer_python"):
        backend.ShardedFlashInfer(stub_runner(case, case.pools()[0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window_size": 4}, "a sliding window of 4 tokens"),
        ({"is_cross_attention": True}, "not causal self-attention"),
        ({"attn_type": "encoder_only"}, "'encoder_only', not causal self-attention"),
        ({"v_head_dim": 4}, f"keys of {DIM} and values of 4 elements"),
    ],
)
def test_layers_are_refused(change: dict[str, Any], words: str) -> None:
    from slime_like_plugins.dcp import flashinfer_attention as backend

    layer = stub_layer(1, DIM)
    assert backend.layer_obstacle(layer) is None
    vars(layer).update(change)
    reason = backend.layer_obstacle(layer)
    assert reason is not None and words in reason


def test_graphs_of_prefills_and_partial_reads_are_refused() -> None:
    from slime_like_plugins.dcp import flashinfer_attention as backend

    rank: Any = object.__new__(backend.ShardedFlashInfer)
    with pytest.raises(NotImplementedError, match="a CUDA graph of a prefill"):
        rank.init_forward_metadata_out_graph(stub_batch(sharded_case([(2, 0)], 2, 1, decode=False)))
    reads = backend.ShardedReads(SimpleNamespace(space="full"), torch.zeros(1, 1), 2, 0)
    assert reads.space == "full"
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="a sequence's first token"):
        reads.pack_read_stream(None, req_pool_indices=one, seq_lens=one, indptr=one, out=one, kv_start_idx=one)


@pytest.mark.slow
def test_kernels_of_sglang() -> None:
    """SGLang's Triton kernels, in Triton's interpreter, agree with their fakes."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.dcp_kernels"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},  # read when the kernels are defined
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
