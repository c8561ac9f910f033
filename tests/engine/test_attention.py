"""Batched attention over a paged KV pool equals a loop over requests in float64."""

from __future__ import annotations

import importlib
import math
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.util.imports import first_import
from slime_like_plugins.sglang_cpu import build
from slime_like_plugins.sglang_cpu.kernels import CKernels
from tests.hypothesis_examples import num_examples

USE_C = st.booleans() if any(shutil.which(name) for name in build.COMPILERS) else st.just(False)
KV_HEADS, GROUP, DIM, SLOTS, WIDTH = 2, 3, 8, 400, 64


LATENT = 5  # width of the latents at the beginning of keys of width DIM


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    """Import SGLang as an engine does, which takes 2 s of CPU time less than the imports in the tests."""
    with first_import("sglang"):
        importlib.import_module("slime_like_plugins.sglang_cpu.attention")
        importlib.import_module("slime_like_plugins.sglang_cpu.latent_attention")


def backend(in_c: bool, latent: bool, **pools: Any) -> Any:
    """Return the backend. The imports are local because importing SGLang takes seconds."""
    from slime_like_plugins.sglang_cpu.attention import BatchedAttention
    from slime_like_plugins.sglang_cpu.latent_attention import LatentAttentionBackend

    kind = LatentAttentionBackend if latent else BatchedAttention
    return kind(SimpleNamespace(**pools), CKernels(build.build().path) if in_c else None)


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_cached: int) -> torch.Tensor:
    """Return attention [Q, H, V] of q [Q, H, D] after ``num_cached`` of the keys [L, K, D] and values [L, K, V]."""
    q, keys, values = q.double(), keys.double(), values.double()
    later_QL = torch.arange(len(keys)) > num_cached + torch.arange(len(q))[:, None]
    of_head = torch.arange(q.shape[1]) // (q.shape[1] // keys.shape[1])
    scores_HQL = torch.einsum("qhd,lhd->hql", q, keys[:, of_head]) / math.sqrt(DIM)
    weights_HQL = torch.softmax(scores_HQL.masked_fill(later_QL, -math.inf), -1)
    return torch.einsum("hql,lhd->qhd", weights_HQL, values[:, of_head])


@settings(deadline=None, max_examples=num_examples(40))
@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=6),
    st.booleans(),
    USE_C,
    st.booleans(),
)
def test_a_batch_of_any_lengths_equals_the_reference(
    requests: list[tuple[int, int]], decode: bool, in_c: bool, latent: bool
) -> None:
    generator = torch.Generator().manual_seed(len(requests))
    num_new = [1 if decode else n for n, _ in requests]
    num_cached = [p + n - 1 if decode else p for n, p in requests]
    num_total = [n + p for n, p in zip(num_new, num_cached, strict=True)]
    slots = torch.randperm(SLOTS, generator=generator)[: sum(num_total)].split(num_total)
    table = torch.zeros(9, WIDTH, dtype=torch.int32)
    rows = torch.randperm(9, generator=generator)[: len(num_new)]
    for row, request_slots in zip(rows, slots, strict=True):
        table[row, : len(request_slots)] = request_slots.int()
    keys, values = (torch.randn(SLOTS, 1 if latent else KV_HEADS, DIM, generator=generator) for _ in range(2))
    values = keys[..., :LATENT] if latent else values
    batched = backend(
        in_c,
        latent,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values),
    )
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decode)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(num_new),
        req_pool_indices=rows,
        seq_lens=torch.tensor(num_total),
        seq_lens_cpu=torch.tensor(num_total),
        extend_seq_lens_cpu=num_new,
        extend_prefix_lens_cpu=num_cached,
    )
    batched.init_forward_metadata(batch)
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=KV_HEADS * GROUP, qk_head_dim=DIM, v_head_dim=values.shape[-1], scaling=DIM**-0.5
    )
    q = torch.randn(sum(num_new), KV_HEADS * GROUP * DIM, generator=generator)
    out = batched.forward_extend(q, q, q, layer, batch, save_kv_cache=False)
    queries = q.view(-1, KV_HEADS * GROUP, DIM).split(num_new)
    expected = [reference(query, keys[s], values[s], p) for query, s, p in zip(queries, slots, num_cached, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected).view_as(out), atol=2e-6, rtol=1e-5)


def test_a_model_with_an_unsupported_layer_is_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    from slime_like_plugins.sglang_cpu import fixed_order_attention
    from slime_like_plugins.sglang_cpu.attention import require_plain_layers

    def layer(**options: Any) -> RadixAttention:
        return RadixAttention(num_heads=2, head_dim=8, scaling=1.0, num_kv_heads=1, layer_id=5, **options)

    require_plain_layers(torch.nn.ModuleList([layer()]))
    for options in (
        {"sliding_window_size": 128},
        {"v_head_dim": 4},
        {"logit_cap": 30.0},
        {"use_irope": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"is_cross_attention": True},
    ):
        model = torch.nn.ModuleList([layer(), layer(**options)])
        with pytest.raises(NotImplementedError, match=r"layer 5 is not plain causal.*set placement.device=cuda"):
            require_plain_layers(model)
        with pytest.raises(NotImplementedError, match=r"layer 5 is not plain causal"):
            fixed_order_attention.create(SimpleNamespace(model=model))


def test_an_option_of_attention_that_the_backend_does_not_compute_is_refused() -> None:
    attention: Any = backend(False, False, req_to_token_pool=None, token_to_kv_pool=None)
    layer, tensors = SimpleNamespace(layer_id=3), (torch.ones(1),) * 3
    with pytest.raises(NotImplementedError, match=r"layer 3 has attention with sinks, which engines on a CPU"):
        attention.forward_decode(*tensors, layer, None, sinks=torch.ones(2), rope=None)
