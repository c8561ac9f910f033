"""The order of every sum is fixed: a row's bits follow from the row, not from its neighbours; and the sums are right."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.util import exact

DIM, GROUPS = 16, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a deterministic run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case(length: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [b, K, L, D] and who sees whom."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, GROUPS, length, DIM, generator=generator) for _ in range(3))
    return q, k, v, torch.ones(batch, length, length, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return exact.attention(q, k, v, visible, DIM**-0.5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 200), st.integers(0, 5))
def test_attention_equals_float64(length: int, seed: int) -> None:
    q, k, v, visible = case(length, seed)
    scores = (q.double() @ k.double().transpose(-1, -2)) / math.sqrt(DIM)
    expected = torch.softmax(scores.masked_fill(~visible[:, None], float("-inf")), -1) @ v.double()
    torch.testing.assert_close(attend(q, k, v, visible).double(), expected, atol=2e-6, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 200), st.integers(0, 5))
def test_a_query_alone_or_after_a_prefix_gets_the_bits_it_gets_among_all(
    data: st.DataObject, length: int, seed: int
) -> None:
    q, k, v, visible = case(length, seed)
    whole = attend(q, k, v, visible)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    padded = data.draw(st.integers(stop, length))  # keys beyond the last visible one are there, and masked
    part = attend(q[:, :, start:stop], k[:, :, :padded], v[:, :, :padded], visible[:, start:stop, :padded])
    assert torch.equal(part, whole[:, :, start:stop])


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 100), st.integers(1, 9), st.integers(0, 5))
def test_a_batch_does_not_change_its_members(length: int, batch: int, seed: int) -> None:
    q, k, v, visible = case(length, seed, batch)
    whole = attend(q, k, v, visible)
    assert torch.equal(attend(q[:1], k[:1], v[:1], visible[:1]), whole[:1])


def test_many_rows_are_taken_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, visible = case(130, 0)
    whole = attend(q, k, v, visible)
    monkeypatch.setattr(exact, "SCORES", 1)
    assert torch.equal(attend(q, k, v, visible), whole)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(exact.COLUMNS, 90), st.integers(8, 200))
def test_a_product_keeps_its_rows_apart(rows: int, more: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows + more, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    assert torch.equal(exact.linear(x[:rows], weight), exact.linear(x, weight)[:rows])
    torch.testing.assert_close(exact.linear(x, weight).double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_attention() -> None:
    q, k, v, visible = (x.double() if x.is_floating_point() else x for x in case(9, 1))
    for x in (q, k, v):
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, c: attend(a, b, c, visible), (q, k, v))


def test_a_machine_that_mixes_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact.check_machine([(96, 64), (33, 40)]) is None
    monkeypatch.setattr(exact, "ROWS", 1)  # as if products of one row were to be trusted
    problem = exact.check_machine([(96, 64)])
    assert problem is not None and "a product of 1 rows with a [96, 64] matrix" in problem
