"""Exact kernels: the bits of a row do not depend on its neighbours, and the results are correct."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.util import batch_invariant
from tests.hypothesis_examples import num_examples

DIM, GROUPS = 16, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as a deterministic run does."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def case(length: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v [b, K, L, D] and the causal mask [b, L, L]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, GROUPS, length, DIM, generator=generator) for _ in range(3))
    return q, k, v, torch.ones(batch, length, length, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return batch_invariant.attention(q, k, v, visible, DIM**-0.5)


@settings(deadline=None, max_examples=num_examples(25))
@given(st.integers(1, 200), st.integers(0, 5))
def test_attention_equals_float64(length: int, seed: int) -> None:
    q, k, v, visible = case(length, seed)
    scores = (q.double() @ k.double().transpose(-1, -2)) / math.sqrt(DIM)
    expected = torch.softmax(scores.masked_fill(~visible[:, None], float("-inf")), -1) @ v.double()
    torch.testing.assert_close(attend(q, k, v, visible).double(), expected, atol=2e-6, rtol=1e-5)


@settings(deadline=None, max_examples=num_examples(40))
@given(st.data(), st.integers(1, 200), st.integers(0, 5))
def test_a_slice_of_queries_has_the_bits_of_the_full_result(data: st.DataObject, length: int, seed: int) -> None:
    q, k, v, visible = case(length, seed)
    full_result = attend(q, k, v, visible)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    num_keys = data.draw(st.integers(stop, length))  # keys beyond the last visible one are masked
    part = attend(q[:, :, start:stop], k[:, :, :num_keys], v[:, :, :num_keys], visible[:, start:stop, :num_keys])
    assert torch.equal(part, full_result[:, :, start:stop])


@settings(deadline=None, max_examples=num_examples(20))
@given(st.integers(1, 100), st.integers(1, 9), st.integers(0, 5))
def test_a_row_does_not_depend_on_its_batch(length: int, batch: int, seed: int) -> None:
    q, k, v, visible = case(length, seed, batch)
    full_result = attend(q, k, v, visible)
    assert torch.equal(attend(q[:1], k[:1], v[:1], visible[:1]), full_result[:1])


def test_many_rows_are_processed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, visible = case(130, 0)
    full_result = attend(q, k, v, visible)
    monkeypatch.setattr(batch_invariant, "MAX_SCORES", 1)
    assert torch.equal(attend(q, k, v, visible), full_result)


@settings(deadline=None, max_examples=num_examples(40))
@given(st.integers(1, 70), st.integers(1, 70), st.integers(batch_invariant.COLUMNS, 90), st.integers(8, 200))
def test_rows_of_a_product_are_independent(rows: int, extra_rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randn(rows + extra_rows, inputs, generator=generator),
        torch.randn(outputs, inputs, generator=generator),
    )
    assert torch.equal(batch_invariant.linear(x[:rows], weight), batch_invariant.linear(x, weight)[:rows])
    torch.testing.assert_close(
        batch_invariant.linear(x, weight).double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-4
    )


def test_attention_gradients_are_correct() -> None:
    q, k, v, visible = (x.double() if x.is_floating_point() else x for x in case(9, 1))
    for x in (q, k, v):
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, c: attend(a, b, c, visible), (q, k, v))


def test_a_machine_that_mixes_rows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_invariant.check_machine([(96, 64), (33, 40)]) is None
    monkeypatch.setattr(batch_invariant, "ROWS", 1)  # as if products of one row were exact
    problem = batch_invariant.check_machine([(96, 64)])
    assert problem is not None and "a product of 1 rows with a [96, 64] matrix" in problem
