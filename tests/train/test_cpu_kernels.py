"""The C kernels of training against their definitions in float64, values and gradients. No megatron."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.train.megatron.model.vocab import VocabularyPart, vocab_scores
from slime_like_plugins.megatron_cpu.functions import (
    AttentionFunction,
    RMSNormFunction,
    SplitRotateFunction,
    SwiGLUFunction,
)
from slime_like_plugins.megatron_cpu.kernels import QUERIES, SOURCE, QkvHeads, TrainKernels, make_kernels
from slime_like_plugins.megatron_cpu.scores import fused_vocab_scores
from slime_like_plugins.sglang_cpu.build import COMPILERS, object_name
from tests.hypothesis_examples import num_examples

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="no C compiler")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS, SEEDS = st.integers(1, 9), st.integers(0, 99)
EPS = 1e-6


@cache
def C() -> TrainKernels:
    """Return the kernels, compiled once per machine."""
    return make_kernels()


def random(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers).to(dtype).requires_grad_() for shape in shapes]


def assert_agree(
    function: Callable[..., object],
    definition: Callable[..., object],
    inputs: Sequence[Tensor],
    step: float | None = None,
) -> None:
    """Assert that outputs and gradients agree within the dtype's rounding or ``step``, relative to the maximum."""
    actual, expected = _outputs_and_gradients(function, inputs), _outputs_and_gradients(definition, _wide(inputs))
    for a, b in zip(actual, expected, strict=True):
        bound = step or (2**-8 if a.dtype is torch.bfloat16 else 2e-6)
        assert a.shape == b.shape
        assert float((a.detach().double() - b.detach()).abs().max()) <= bound * max(1.0, float(b.detach().abs().max()))


def _wide(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


def _outputs_and_gradients(function: Callable[..., object], inputs: Sequence[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    outs: list[Tensor] = [out] if isinstance(out, Tensor) else list(out)  # pyright: ignore[reportArgumentType]
    numbers = torch.Generator().manual_seed(7)
    directions = [torch.randn(x.shape, generator=numbers).bfloat16().to(x.dtype) for x in outs]
    return [*outs, *torch.autograd.grad(outs, inputs, directions)]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@settings(deadline=None, max_examples=num_examples(60))
@given(rows=ROWS, width=st.integers(8, 200), dtype=DTYPES, seed=SEEDS)  # the norm of one number has no gradient
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    inputs = random(seed, (rows, 1, width), (width,), dtype=dtype)
    assert_agree(lambda x, w: RMSNormFunction.apply(x, w, EPS, C()), rms, inputs)


@settings(deadline=None, max_examples=num_examples(60))
@given(rows=ROWS, width=st.integers(1, 200), dtype=DTYPES, seed=SEEDS)
def test_swiglu(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    inputs = random(seed, (rows, 1, 2 * width), dtype=dtype)

    def definition(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    assert_agree(lambda x: SwiGLUFunction.apply(x, None, C()), definition, inputs)


@settings(deadline=None, max_examples=num_examples(40))
@given(rows=ROWS, width=st.integers(1, 200), dtype=DTYPES, seed=SEEDS)
def test_scaled_swiglu(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    (gate_up,), (scale,) = random(seed, (rows, 2 * width), dtype=dtype), random(seed, (rows,), dtype=torch.float32)

    def definition(x: Tensor, scale: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * scale[:, None]

    assert_agree(lambda x, s: SwiGLUFunction.apply(x, s, C()), definition, [gate_up, scale])


def test_swiglu_far_from_zero() -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e4, float("nan"), float("inf")])
    rows = torch.cat((gate, torch.full_like(gate, 0.5)))[None]
    torch.testing.assert_close(C().swiglu(rows)[0], F.silu(gate) * 0.5, equal_nan=True, atol=1e-30, rtol=2e-6)


@settings(deadline=None, max_examples=num_examples(60))
@given(
    rows=ROWS,
    groups=st.integers(1, 3),
    queries=st.integers(1, 4),
    half=st.integers(4, 40),
    normed=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_split_norm_rotate(
    rows: int, groups: int, queries: int, half: int, normed: bool, dtype: torch.dtype, seed: int
) -> None:
    heads = QkvHeads(groups, queries, 2 * half)
    angles = torch.rand(rows, half, generator=torch.Generator().manual_seed(seed)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    def fused(mixed: Tensor, *weights: Tensor) -> object:
        return SplitRotateFunction.apply(mixed, *(weights or (None, None)), cos_sin, heads, EPS, C())

    def definition(mixed: Tensor, *weights: Tensor) -> list[Tensor]:
        parts = mixed.view(rows, groups, queries + 2, heads.dim)
        columns = [parts[:, :, :queries].flatten(1, 2), parts[:, :, queries], parts[:, :, queries + 1]]
        for i, weight in enumerate(weights):
            columns[i] = rms(columns[i], weight)
        cos, sin = (x.double()[:, None] for x in cos_sin.chunk(2, -1))
        for i in (0, 1):
            a, b = columns[i].chunk(2, -1)
            columns[i] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return columns

    weights = ((heads.dim,), (heads.dim,)) if normed else ()
    assert_agree(fused, definition, random(seed, (rows, heads.width), *weights, dtype=dtype))


@settings(deadline=None, max_examples=num_examples(80))
@given(
    rows=ROWS,
    real=st.integers(1, 70),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 9),
    temperature=st.floats(0.3, 3.0),
    entropy=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
@example(rows=8, real=1, padding=0, chunk=1, temperature=0.3125, entropy=True, dtype=torch.float32, seed=1)
def test_scores(
    rows: int, real: int, padding: int, chunk: int, temperature: float, entropy: bool, dtype: torch.dtype, seed: int
) -> None:
    """Scores equal float64 scores of the same logits, which torch's matrix product has already rounded to the dtype."""
    hidden, weight = random(seed, (rows, 6), (real + padding, 6), dtype=dtype)
    target = torch.randint(0, real, (rows,), generator=torch.Generator().manual_seed(seed))
    part = VocabularyPart(0, real, None)

    def fused(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        out = fused_vocab_scores(
            hidden, weight, target, part=part, temperature=temperature, chunk=chunk, entropy=entropy
        )
        return [x for x in out if x is not None]

    def definition(hidden: Tensor, weight: Tensor) -> list[Tensor]:
        logits = hidden @ weight[:real].T
        rounded = logits + (logits.detach().to(dtype).double() - logits.detach())
        log_p = torch.log_softmax(rounded / temperature, -1)
        return [log_p.gather(1, target[:, None])[:, 0], *([-(log_p.exp() * log_p).sum(-1)] if entropy else [])]

    # Where one token has all of the probability, terms of size 1 / temperature cancel in the gradients.
    step = 2e-2 if dtype is torch.bfloat16 else 1e-5 * max(1.0, 1 / temperature)
    assert_agree(fused, definition, [hidden, weight], step=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradients", [(True, False), (False, True), (True, True)])
def test_gradients_of_logits_are_rounded_once(dtype: torch.dtype, has_gradients: tuple[bool, bool]) -> None:
    """Rows exceed the block of one float32 sum. Gradients are of either or both results, and also in place."""
    (logits,) = random(0, (5, 2500), dtype=dtype)
    target, factors = (
        torch.tensor([0, 17, 1024, 2499, 3]),
        torch.randn(2, 5, generator=torch.Generator().manual_seed(1)),
    )
    exact = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(exact / 0.7, -1)
    columns = (log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    sum(
        (
            (f.double() * c).sum()
            for f, c, has_gradient in zip(factors, columns, has_gradients, strict=True)
            if has_gradient
        )
    ).backward()  # pyright: ignore[reportAttributeAccessIssue]

    plain = logits.detach()
    logprobs, log_sums, entropies = C().log_probs(plain, target, 0.7, entropy=True)
    grads = (factors[0] * has_gradients[0], factors[1] if has_gradients[1] else None)
    assert entropies is not None and exact.grad is not None
    for actual, expected in zip((logprobs, entropies), columns, strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=2e-6)
    out, in_place = torch.empty_like(plain), plain.clone()
    C().log_probs_back(plain, target, (log_sums, entropies), grads, 0.7, out)
    C().log_probs_back(in_place, target, (log_sums, entropies), grads, 0.7, in_place)
    assert torch.equal(out, in_place)
    step = 2**-8 if dtype is torch.bfloat16 else 5e-6
    assert bool(((out.double() - exact.grad).abs() <= step * exact.grad.abs() + 1e-8).all())


def test_nan_and_infinite_logits_give_nan_scores() -> None:
    logits = torch.zeros(3, 40)
    logits[0, 7], logits[1, 39] = float("nan"), float("inf")
    logprobs, log_sums, entropies = C().log_probs(logits, torch.tensor([0, 0, 0]), 1.0, entropy=True)
    assert entropies is not None
    for scores in (logprobs, entropies):
        assert scores.isnan().tolist() == [True, True, False]
    out = torch.empty_like(logits)
    C().log_probs_back(logits, torch.tensor([0, 0, 0]), (log_sums, None), (torch.ones(3), None), 1.0, out)
    assert out[:2].isnan().any(-1).all() and not out[2].isnan().any()


def test_scores_agree_with_the_torch_path() -> None:
    """Scores and gradients agree for one chunk, whose logits are kept, and for several, even in a second backward."""
    hidden, weight = random(3, (50, 16), (33, 16), dtype=torch.float32)
    target = torch.arange(50) % 33
    options: dict[str, Any] = {"part": VocabularyPart(0, 33, None), "temperature": 0.8, "entropy": True}
    for chunk in (50, 7):
        outputs: list[list[Tensor]] = []
        for scores in (vocab_scores, fused_vocab_scores):
            logprobs, entropies = scores(hidden, weight, target, chunk=chunk, **options)
            assert entropies is not None
            total = logprobs.sum() + entropies.sum()
            first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
            second = torch.autograd.grad(total, (hidden, weight))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            outputs.append([logprobs, entropies, *first])
        for ours, fused in zip(*outputs, strict=True):
            torch.testing.assert_close(fused, ours, atol=1e-5, rtol=1e-5)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for target in ([0, 4], [-1, 0]):
        with pytest.raises(AssertionError, match="a target is outside the 4 logits"):
            C().log_probs(torch.zeros(2, 4), torch.tensor(target), 1.0, entropy=False)


LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=6)


@settings(deadline=None, max_examples=num_examples(60))
@given(
    lengths=LENGTHS,
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    lanes=st.integers(1, 4),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_attention(lengths: list[int], groups: int, queries: int, lanes: int, dtype: torch.dtype, seed: int) -> None:
    n, h, d = sum(lengths), groups * queries, 16 * lanes
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

    def definition(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            k, v = (x.repeat_interleave(queries, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
            hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
        return torch.cat(parts)

    inputs = random(seed, (n, h, d), (n, groups, d), (n, groups, d), dtype=torch.float32)
    assert_agree(lambda *x: AttentionFunction.apply(*x, cu_seqlens, 0.3, dtype, C()), definition, inputs)


def test_attention_gives_the_same_bits_on_any_number_of_threads() -> None:
    inputs = random(0, (150, 4, 32), (150, 2, 32), (150, 2, 32), dtype=torch.float32)
    bounds = torch.tensor([0, 40, 41, 120, 150]).int()
    before = torch.get_num_threads()
    try:
        outputs: list[list[Tensor]] = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            attend = lambda *x: AttentionFunction.apply(*x, bounds, 0.2, torch.float32, C())  # noqa: E731
            outputs.append(_outputs_and_gradients(attend, inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one_thread, three_threads) for one_thread, three_threads in zip(*outputs, strict=True))


def test_bounds_outside_the_tokens_are_refused() -> None:
    columns = (torch.ones(5, 2, 16), torch.ones(5, 2, 16), torch.ones(5, 2, 16))
    for bounds in ([0, 6], [0, 4], [1, 5], [0, 6, 5]):
        with pytest.raises(AssertionError):
            C().attention(columns, torch.tensor(bounds).int(), 1.0, torch.float32)


def test_rows_shared_by_threads_give_the_same_gradients() -> None:
    inputs = random(0, (999, 1, 96), (96,), dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            outputs.append(_outputs_and_gradients(lambda x, w: RMSNormFunction.apply(x, w, EPS, C()), inputs))
    finally:
        torch.set_num_threads(before)
    for one_thread, three_threads, repeated in zip(*outputs, strict=True):
        torch.testing.assert_close(one_thread, three_threads, atol=1e-4, rtol=1e-4)
        assert torch.equal(three_threads, repeated)


def test_inputs_of_other_shapes_strides_and_dtypes_are_refused() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    for rows, scale in ((x.T, weight), (x, weight[:4]), (x, weight.double())):
        with pytest.raises(AssertionError):
            C().rms_norm(rows, scale, EPS)


def test_each_source_has_an_object_of_its_own() -> None:
    compiler = next(path for name in COMPILERS if (path := shutil.which(name)))
    assert object_name(compiler, SOURCE) != object_name(compiler)


def test_scratch_size_of_attention_equals_the_source() -> None:
    assert f"#define QUERIES {QUERIES}\n" in (SOURCE / "rows.h").read_text()
