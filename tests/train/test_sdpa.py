"""Batched attention over packed sequences against one sequence at a time, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.train.megatron.model.sdpa import attention_batches, in_batches, in_pieces
from tests.hypothesis_examples import num_examples

CPU = torch.device("cpu")
RAGGED = [9, 3, 8, 1, 9, 16, 2]


def bounds(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def batched(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    query, key, value = inputs
    return in_batches(query, key, value, attention_batches(bounds(lengths), CPU), 0.3)


def by_definition(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """Compute causal attention of each sequence by an explicit softmax."""
    parts: list[Tensor] = []
    for q, k, v in zip(*(x.split(lengths) for x in inputs), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(parts)


Attend = Callable[[list[Tensor], list[int]], Tensor]


def values_and_gradients(attend: Attend, lengths: list[int]) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes]
    out = attend(inputs, lengths)
    return [out, *torch.autograd.grad((out * torch.randn(shapes[0], generator=numbers)).sum(), inputs)]


@settings(deadline=None, max_examples=num_examples(60))
@example(lengths=[7])
@example(lengths=[5] * 8)
@example(lengths=[5] * 4 + [6] * 4)
@example(lengths=RAGGED)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=24))
def test_batches_attend_as_single_sequences_do(lengths: list[int]) -> None:
    for actual, expected in zip(
        values_and_gradients(batched, lengths), values_and_gradients(by_definition, lengths), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_pieces_attend_as_single_sequences_do() -> None:
    def in_own_pieces(inputs: list[Tensor], lengths: list[int]) -> Tensor:
        query, key, value = inputs
        return in_pieces(query, key, value, [(n, n) for n in lengths], 0.3)

    for actual, expected in zip(
        values_and_gradients(in_own_pieces, RAGGED), values_and_gradients(by_definition, RAGGED), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_neighbours_of_one_length_are_not_moved() -> None:
    batches = attention_batches(bounds([5] * 8 + [6] * 8), CPU)
    assert batches.shapes == ((8, 5), (8, 6))
    assert batches.slot_of is None


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_padding_is_bounded_and_every_token_has_a_slot(lengths: list[int]) -> None:
    batches = attention_batches(bounds(lengths), CPU)
    slots = sum(count * longest for count, longest in batches.shapes)
    assert sum(count for count, _ in batches.shapes) == len(lengths)
    assert sum(lengths) <= slots <= sum(lengths) * 8 / 7
    if batches.slot_of is not None and batches.token_of is not None and batches.padding is not None:
        assert torch.equal(batches.token_of[batches.slot_of], torch.arange(sum(lengths)))
        assert len(batches.padding) == slots - sum(lengths)


def test_padding_slots_give_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``index_fill_``, which clears the gradient of padding queries, the gradient of the keys is wrong."""
    lengths = RAGGED
    expected = values_and_gradients(batched, lengths)
    monkeypatch.setattr(torch.Tensor, "index_fill_", lambda self, *_: self)
    wrong = values_and_gradients(batched, lengths)
    assert not torch.allclose(expected[2], wrong[2])
