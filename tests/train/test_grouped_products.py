"""Grouped experts against float64 definitions: values and gradients, also of experts without tokens. No megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.train.megatron.model.grouped_products import GroupedLinear, WeightedSwiGLU
from slime_like.train.megatron.model.token_rows import Reorder, by_expert, token_rows
from tests.hypothesis_examples import num_examples
from tests.values import has_values

STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
DTYPES, SEEDS = st.sampled_from(list(STEP)), st.integers(0, 99)
COUNTS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def random(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers).to(device, dtype).requires_grad_() for shape in shapes]


def assert_agree(
    function: Callable[..., Tensor], definition: Callable[..., Tensor], inputs: Sequence[Tensor], terms: int = 1
) -> None:
    """Assert that results and gradients agree with those in float64 within the rounding of a sum of ``terms``."""
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    for actual, expected in zip(_results(function, inputs), _results(definition, wide), strict=True):
        assert actual.shape == expected.shape
        error = (actual.cpu().double() - expected).abs().max() if len(actual.flatten()) else torch.zeros(())
        top = expected.abs().max() if len(actual.flatten()) else torch.zeros(())
        assert not has_values() or float(error) <= STEP[inputs[0].dtype] * terms**0.5 * max(1.0, float(top))


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def grouped(counts: Sequence[int]) -> Callable[..., Tensor]:
    def function(rows: Tensor, *weights: Tensor) -> Tensor:
        out = GroupedLinear.apply(rows, tuple(counts), *weights)
        assert isinstance(out, Tensor)
        return out

    return function


def one_by_one(counts: Sequence[int]) -> Callable[..., Tensor]:
    def definition(rows: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(rows.split(list(counts)), weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])

    return definition


@settings(deadline=None, max_examples=num_examples(60))
@given(counts=COUNTS, inputs=st.integers(1, 40), outputs=st.integers(1, 40), dtype=DTYPES, seed=SEEDS)
@example(counts=[0, 0], inputs=3, outputs=2, dtype=torch.float32, seed=0)
@example(counts=[0, 5, 0], inputs=8, outputs=8, dtype=torch.bfloat16, seed=0)
def test_grouped_linear(counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> None:
    tensors = random(seed, (sum(counts), inputs), *[(outputs, inputs)] * len(counts), dtype=dtype)
    assert_agree(grouped(counts), one_by_one(counts), tensors, terms=max(inputs, outputs, 7))


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    tensors = random(0, (4, 5), *[(3, 5)] * 3, dtype=torch.float32)
    _, _, first, empty, last = _results(grouped([1, 0, 3]), tensors)
    assert not empty.any() and first.any() and last.any()


def test_the_grouped_kernel_has_the_same_shapes() -> None:
    counts, meta = [3, 0, 5], torch.device("meta")
    rows = torch.empty(8, 16, dtype=torch.bfloat16, device=meta, requires_grad=True)
    weights = [torch.empty(24, 16, dtype=torch.bfloat16, device=meta, requires_grad=True) for _ in counts]
    out = grouped(counts)(rows, *weights)
    assert (out.shape, out.dtype, out.device) == ((8, 24), torch.bfloat16, meta)
    grads = torch.autograd.grad(out, [rows, *weights], torch.empty_like(out))
    assert [grad.shape for grad in grads] == [rows.shape, *(weight.shape for weight in weights)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0, 0, 64], [0, 0, 0, 0]])
def test_grouped_linear_on_a_gpu(counts: list[int], dtype: torch.dtype) -> None:
    tensors = random(0, (sum(counts), 64), *[(96, 64)] * 4, dtype=dtype, device="cuda")
    assert_agree(grouped(counts), one_by_one(counts), tensors, terms=130)


@settings(deadline=None, max_examples=num_examples(40))
@given(rows=st.integers(0, 9), width=st.integers(1, 40), dtype=DTYPES, seed=SEEDS)
def test_weighted_swiglu(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    gate_up, probs = *random(seed, (rows, 2 * width), dtype=dtype), *random(seed, (rows,), dtype=torch.float32)

    def function(gate_up: Tensor, probs: Tensor) -> Tensor:
        out = WeightedSwiGLU.apply(gate_up, probs)
        assert isinstance(out, Tensor)
        return out

    def definition(gate_up: Tensor, probs: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up * probs[:, None]

    assert_agree(function, definition, [gate_up, probs], terms=4 * width)


# ---- rows of tokens --------------------------------------------------------------------------------------------------
def routing(num_tokens: int, experts: int, top_k: int, seed: int) -> Tensor:
    """Return a random mask [tokens, experts] with ``top_k`` experts per token."""
    scores = torch.rand(num_tokens, experts, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(num_tokens, experts, dtype=torch.bool).scatter(1, scores.topk(top_k, 1).indices, value=True)


@settings(deadline=None, max_examples=num_examples(60))
@given(tokens=st.integers(0, 12), experts=st.integers(1, 9), data=st.data(), dtype=DTYPES, seed=SEEDS)
def test_rows_of_tokens(tokens: int, experts: int, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    mask = routing(tokens, experts, top_k, seed)
    rows = token_rows(mask, mask.sum(0), top_k)
    expert_R, token_R = mask.T.nonzero().T
    assert torch.equal(rows.token_R, token_R)
    (probs,) = random(seed, (tokens, experts), dtype=torch.float32)
    assert_agree(rows.probabilities, lambda p: p[token_R, expert_R], [probs])
    assert_agree(rows.gather, lambda x: x[token_R], random(seed, (tokens, 5), dtype=dtype), terms=top_k)
    combined = lambda y: torch.zeros(tokens, 5, dtype=y.dtype).index_add(0, token_R, y)  # noqa: E731
    assert_agree(rows.combine, combined, random(seed, (tokens * top_k, 5), dtype=dtype), terms=top_k)


@settings(deadline=None, max_examples=num_examples(60))
@given(senders=st.integers(1, 4), experts=st.integers(1, 5), seed=SEEDS)
def test_received_rows_are_ordered_by_expert(senders: int, experts: int, seed: int) -> None:
    counts_SE = torch.randint(0, 4, (senders, experts), generator=torch.Generator().manual_seed(seed))
    chunks = torch.arange(int(counts_SE.sum()), dtype=torch.float64).split(counts_SE.flatten().tolist())
    expected = torch.cat([chunks[s * experts + e] for e in range(experts) for s in range(senders)])
    index, inverse = by_expert(counts_SE, len(expected))
    rows = torch.arange(len(expected), dtype=torch.float64, requires_grad=True)
    ordered = Reorder.apply(rows, index, inverse)
    assert isinstance(ordered, Tensor) and torch.equal(ordered, expected)
    assert torch.equal(ordered[inverse], rows)
    (grad,) = torch.autograd.grad(ordered, rows, expected.detach())
    assert torch.equal(grad, rows)  # row r went to the place whose gradient is r
