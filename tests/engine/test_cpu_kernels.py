"""C kernels of decoding, compared with torch kernels and float64, without an engine or SGLang."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.rollout_sampling.hooks import draw, uniform
from slime_like_plugins.sglang_cpu.kernels import TorchKernels
from tests.engine.c_kernels import C, needs_compiler
from tests.hypothesis_examples import num_examples

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = st.integers(1, 5)
TORCH = TorchKernels()


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to float32 rounding; in bfloat16, few values may differ by one unit in the last place."""
    if actual.dtype is torch.float32:
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)
        return
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=2**-7)
    is_different = (actual - expected).abs() > 1e-30  # smaller differences are of silu for large negative inputs
    assert is_different.float().mean() <= 0.02 + 2 / actual.numel()


@needs_compiler
@settings(deadline=None, max_examples=num_examples(60))
@given(rows=ROWS, width=st.integers(1, 200), dtype=DTYPES, residual=st.booleans(), seed=st.integers(0, 99))
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype, residual: bool, seed: int) -> None:
    x, weight = random(seed, rows, width, dtype=dtype), random(seed + 1, width, dtype=dtype)
    delta = random(seed + 2, rows, width, dtype=dtype) if residual else None
    actual, expected = x.clone(), x.clone()
    out, expected_out = torch.empty_like(x), torch.empty_like(x)
    C().add_rms_norm(actual, delta, weight, out, 1e-6)
    TORCH.add_rms_norm(expected, delta, weight, expected_out, 1e-6)
    assert torch.equal(actual, expected)  # a single addition rounds once, so it has to be exact
    assert_equal_up_to_rounding(out, expected_out)
    row = x.double() + (0 if delta is None else delta.double())
    reference = row * (row.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5)


@needs_compiler
@settings(deadline=None, max_examples=num_examples(60))
@given(rows=ROWS, width=st.integers(1, 200), dtype=DTYPES, scale=st.sampled_from([1.0, 30.0, 200.0]))
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = random(width, rows, 2 * width, dtype=dtype)
    gate_up[:, :width] *= scale
    actual, expected = torch.empty(2, rows, width, dtype=dtype)
    C().silu_mul(gate_up, actual)
    TORCH.silu_mul(gate_up, expected)
    assert_equal_up_to_rounding(actual / scale, expected / scale)


@needs_compiler
@settings(deadline=None, max_examples=num_examples(60))
@given(
    rows=ROWS,
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (3, 3)]),
    half=st.integers(1, 70),
    dtype=DTYPES,
    has_norms=st.booleans(),
)
def test_rope_and_store(rows: int, heads: tuple[int, int], half: int, dtype: torch.dtype, has_norms: bool) -> None:
    (queries, kv), dim, slots, length = heads, 2 * half, 11, 50
    qkv = random(half, rows, (queries + 2 * kv) * dim, dtype=dtype)
    norms = (random(1, dim, dtype=dtype), random(2, dim, dtype=dtype)) if has_norms else None
    phase = random(3, length, half)
    positions = torch.randint(length, (rows,), generator=torch.Generator().manual_seed(rows))
    angles = torch.cat((phase.cos(), phase.sin()), -1), positions
    slot_ids = torch.randperm(slots, generator=torch.Generator().manual_seed(half))[:rows]
    results: list[tuple[Tensor, ...]] = []
    for kernels in (C(), TORCH):
        pools = torch.zeros(slots, kv, dim, dtype=dtype), torch.zeros(slots, kv, dim, dtype=dtype)
        out = torch.empty(rows, queries, dim, dtype=dtype)
        kernels.rope_and_store(qkv, norms, angles, slot_ids, pools, out, 1e-6)
        results.append((out, *pools))
    for actual, expected in zip(*results, strict=True):
        assert_equal_up_to_rounding(actual, expected)
    unused_slots = torch.ones(slots, dtype=torch.bool).index_fill_(0, slot_ids, False)
    assert not results[0][1][unused_slots].any()  # no other slot is written
    assert torch.equal(results[0][2][slot_ids], qkv.view(rows, -1, dim)[:, queries + kv :])


@needs_compiler
@settings(deadline=None, max_examples=num_examples(60))
@given(
    lens=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 4), (7, 1), (10, 2)]),
    dim=st.sampled_from([1, 2, 8, 18, 32, 40, 64, 128]),
    dtype=DTYPES,
)
def test_attention(lens: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    queries, kv = heads
    q = random(dim, len(lens), queries, dim, dtype=dtype)
    keys, values = (random(seed, 400, kv, dim, dtype=dtype) for seed in (1, 2))
    generator = torch.Generator().manual_seed(len(lens))
    table = torch.full((9, 71), 10**6, dtype=torch.int32)  # entries beyond a request's length are invalid
    rows = torch.randperm(9, generator=generator)[: len(lens)]
    pages = torch.randperm(400, generator=generator)[: sum(lens)].split(lens)
    for row, request_slots in zip(rows, pages, strict=True):
        table[row, : len(request_slots)] = request_slots.int()
    out = C().attention(q, (keys, values), table, rows, torch.tensor(lens), dim**-0.5)
    for i, page in enumerate(pages):
        k, v = (t[page].double().repeat_interleave(queries // kv, 1) for t in (keys, values))
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q[i].double(), k) / math.sqrt(dim), -1)
        reference = torch.einsum("hl,lhd->hd", weights, v)
        tolerance = (1e-6, 2**-8) if dtype is torch.bfloat16 else (3e-6, 1e-5)
        torch.testing.assert_close(out[i].double(), reference, atol=tolerance[0], rtol=tolerance[1])


@needs_compiler
@settings(deadline=None, max_examples=num_examples(60))
@given(rows=ROWS, vocabulary=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 500, 1000]), seed=st.integers(0, 10**6))
def test_sampling(rows: int, vocabulary: int, seed: int) -> None:
    """The token and its score equal torch's for the same seed, unless the draw is within rounding of a boundary."""
    padded_logits = random(seed, rows, vocabulary + 12, scale=3.0)
    logits = padded_logits[:, :vocabulary]
    logits[:, :: max(2, vocabulary // 7)] = -math.inf
    logits[:, vocabulary // 2] = 1.0
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.rand(rows, 1, generator=generator) + 0.3
    seeds, positions = torch.randint(-(2**62), 2**62, (2, rows), generator=generator)
    top_k = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32) * (1 << 30) + 1
    sample = C().sample(logits, temperatures, top_k, seeds, positions)
    assert sample is not None
    tokens, scores = sample
    logprobs = torch.log_softmax(logits / temperatures, -1)
    u = uniform(seeds, positions)
    assert torch.equal(C().uniform(seeds, positions), u)
    expected = torch.where(top_k <= 1, logprobs.argmax(-1), draw(logprobs.exp(), u))
    sums = logprobs.double().exp().cumsum(-1)
    is_at_boundary = (sums / sums[:, -1:] - u[:, None]).abs().min(-1).values < 1e-6
    assert ((tokens == expected) | (is_at_boundary & (top_k > 1))).all()
    torch.testing.assert_close(scores, logprobs.gather(1, tokens.long()[:, None])[:, 0], atol=2e-6, rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("positions", [torch.arange(8, dtype=torch.int32), torch.arange(7)])
def test_random_numbers_need_one_position_of_int64_per_seed(positions: Tensor) -> None:
    with pytest.raises(AssertionError, match="positions"):
        C().uniform(torch.arange(8), positions)
    columns = torch.arange(16).view(8, 2)
    assert torch.equal(C().uniform(columns[:, 0], columns[:, 1]), uniform(columns[:, 0], columns[:, 1]))


@needs_compiler
def test_a_draw_never_leaves_the_support() -> None:
    """The draws include some that rounding moves past the last token with a probability above 0."""
    logits = torch.full((64, 1000), -math.inf)
    logits[:, :3] = random(0, 64, 3)
    sample = C().sample(
        logits, torch.ones(64, 1), torch.full((64,), 1 << 30, dtype=torch.int32), torch.arange(64), torch.arange(64)
    )
    assert sample is not None
    assert int(sample[0].max()) < 3


@needs_compiler
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("top_k", [1, 1 << 30])
def test_logits_that_are_not_finite_are_left_to_sglang(value: float, top_k: int) -> None:
    logits = random(0, 3, 40)
    logits[1, 17] = value
    columns = torch.ones(3, 1), torch.full((3,), top_k, dtype=torch.int32), torch.arange(3), torch.arange(3)
    assert C().sample(logits, *columns) is None


@needs_compiler
def test_attention_is_independent_of_the_number_of_threads() -> None:
    num_threads = torch.get_num_threads()
    q, pool = random(0, 64, 4, 32), (random(1, 900, 2, 32), random(2, 900, 2, 32))
    table = torch.arange(900, dtype=torch.int32).repeat(64, 1)
    lens = torch.arange(64) * 13 + 1
    results: list[Tensor] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(C().attention(q, pool, table, torch.arange(64), lens, 0.2))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*results)


@needs_compiler
def test_kernels_propagate_nan() -> None:
    """Weights that no push wrote are NaN and have to remain visible in the outputs."""
    x, weight = random(0, 2, 40), torch.ones(40)
    x[0, 33] = math.nan
    out = torch.empty_like(x)
    C().add_rms_norm(x, None, weight, out, 1e-6)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()
    for dtype in (torch.float32, torch.bfloat16):
        product = torch.empty(2, 20, dtype=dtype)
        C().silu_mul(x.to(dtype), product)
        assert product[0, 13].isnan()


@needs_compiler
def test_attention_without_requests_reads_no_length() -> None:
    pool, table = random(1, 9, 2, 32), torch.zeros(4, 9, dtype=torch.int32)
    no_rows = torch.empty(0, dtype=torch.int64)
    assert C().attention(torch.empty(0, 4, 32), (pool, pool), table, no_rows, no_rows, 0.2).shape == (0, 4, 32)


@needs_compiler
def test_arguments_with_which_c_would_read_outside_its_memory_are_refused() -> None:
    x = random(0, 2, 40)
    with pytest.raises(AssertionError, match=r"summand of torch\.bfloat16"):
        C().add_rms_norm(x, x.bfloat16(), torch.ones(40), torch.empty_like(x), 1e-6)
    with pytest.raises(AssertionError, match=r"SwiGLU of torch\.bfloat16 into torch\.float32"):
        C().silu_mul(x.bfloat16(), torch.empty(2, 20))
    with pytest.raises(AssertionError, match=r"gate and up \(2, 40\) for 2 x 21"):
        C().silu_mul(x, torch.empty(2, 21))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        table, rows, lens = torch.zeros(1, 9, dtype=torch.int32), torch.tensor([0]), torch.tensor([3])
        pool = x.view(2, 2, 20)
        out, lse = C().partial_attention(x[:1].view(1, 2, 20), (pool, pool), table, rows, lens, 0.2)
    finally:
        torch.set_default_dtype(default)
    assert out.dtype is lse.dtype is torch.float32
