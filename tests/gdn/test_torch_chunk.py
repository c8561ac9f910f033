"""torch backend against the recurrence, token by token in float64: values and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.qwen_gdn import chunk_backward, chunk_forward, packing, torch_chunk
from slime_like_plugins.qwen_gdn.chunk_forward import ChunkInputs
from slime_like_plugins.qwen_gdn.torch_chunk import CHUNK, TorchGDN
from tests.gdn.recurrence import (
    LAYER_F32,
    CaseShape,
    RecurrenceCase,
    RecurrenceOutput,
    answer,
    errors,
    make_case,
    of_backend,
    oracle,
    recurrence,
    weights_of,
)
from tests.hypothesis_examples import num_examples

EXACT = 1e-12
TORCH = TorchGDN()


def assert_equals_recurrence(case: RecurrenceCase, tolerance: float = EXACT) -> None:
    largest_errors = errors(of_backend(TORCH, case), oracle(case))
    assert max(largest_errors.values()) <= tolerance, largest_errors


SHAPES = st.builds(
    CaseShape,
    lengths=st.lists(st.integers(0, 2 * CHUNK + 5), min_size=1, max_size=4).map(tuple),
    heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    key=st.sampled_from([2, 4, 8]),
    value=st.sampled_from([1, 4, 6]),
    tail=st.integers(0, 5),
    state=st.booleans(),
)


@settings(max_examples=num_examples(25))
@given(SHAPES, st.sampled_from([1e-3, 0.1, 3.0]), st.integers(0, 99))
def test_any_lengths_heads_and_padding(shape: CaseShape, decay: float, seed: int) -> None:
    assert_equals_recurrence(make_case(shape, seed=seed, decay=decay))


@pytest.mark.parametrize(
    ("shape", "decay", "same_keys"),
    [
        (CaseShape((0, 0, 0), tail=3), 1.0, False),
        (CaseShape((1, 1, 1, 0, 1)), 1.0, False),
        (CaseShape((CHUNK, 2 * CHUNK)), 1.0, False),
        (CaseShape((3 * CHUNK + 1, 7), groups=2, value=5), 1e-4, False),
        (CaseShape((150,), key=16, value=32), 0.0, False),
        (CaseShape((150, 20)), 0.01, True),
        (CaseShape((130,)), 0.0, True),
    ],
    ids=["all empty", "one token each", "whole chunks", "weak decay", "no decay", "same keys", "same keys, no decay"],
)
def test_edges(shape: CaseShape, decay: float, same_keys: bool) -> None:
    assert_equals_recurrence(make_case(shape, decay=decay, same_keys=same_keys))


def test_strong_decay() -> None:
    # exp of a chunk's total decay, e^-1000, underflows float64: only differences in the lower triangle may be used.
    assert_equals_recurrence(make_case(CaseShape((2 * CHUNK + 3, 5)), decay=16.0), tolerance=1e-12)


@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    [(torch.float32, ("g",), 2e-5), (torch.bfloat16, ("g",), 3e-2), (torch.bfloat16, LAYER_F32, 3e-2)],
)
def test_lower_precision_keeps_its_dtypes(dtype: torch.dtype, wide: tuple[str, ...], tolerance: float) -> None:
    case = make_case(CaseShape((130, 0, 3), groups=2, key=32, value=16), decay=0.3).to(dtype, wide=wide)
    actual = of_backend(TORCH, case)
    assert actual.out.dtype == dtype
    assert actual.final.dtype == torch.float32
    assert {name: grad.dtype for name, grad in actual.grads.items()} == {n: t.dtype for n, t in case.leaves().items()}
    largest_errors = errors(actual, oracle(case))
    assert max(largest_errors.values()) <= tolerance, largest_errors


def test_gradients_by_finite_differences() -> None:
    case = make_case(CaseShape((5, 0, 3), groups=2, key=3, value=2, tail=1))

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, state = tensors
        out, final = TORCH.chunk_rule(
            q, k, v, g, beta,
            cu_seqlens=case.bounds, cu_seqlens_cpu=case.bounds, initial_state=state, output_final_state=True,
        )  # fmt: skip
        assert final is not None
        return out, final

    assert torch.autograd.gradcheck(call, tuple(case.leaves().values()))


def test_packing_changes_nothing() -> None:
    """Values and gradients of a packed sequence equal those of the sequence alone."""
    packed = make_case(CaseShape((70, 1, 0, 129), groups=2, tail=4))
    results = of_backend(TORCH, packed)
    weights = weights_of((results.out, results.final))
    for n, (start, stop) in enumerate(itertools.pairwise(packed.cu_seqlens)):

        def part_of(name: str, tensor: Tensor, n: int = n, start: int = start, stop: int = stop) -> Tensor:
            return tensor[n : n + 1] if name in ("initial", "final") else tensor[:, start:stop]

        rows = {name: part_of(name, tensor) for name, tensor in packed.leaves().items()}
        single = replace(packed, **rows, cu_seqlens=(0, stop - start)).to(torch.float64)
        right = answer(single, recurrence(single), (part_of("out", weights[0]), part_of("final", weights[1])))
        grads = {name: part_of(name, grad) for name, grad in results.grads.items()}
        largest_errors = errors(
            RecurrenceOutput(part_of("out", results.out), part_of("final", results.final), grads), right
        )
        assert largest_errors.keys() == {"out", "final", *packed.leaves()}
        assert max(largest_errors.values()) <= EXACT, (n, largest_errors)


@settings(max_examples=num_examples(10))
@given(st.integers(0, 150))
def test_a_split_with_state_passing_changes_nothing(cut: int) -> None:
    full = make_case(CaseShape((150,), groups=2))
    right = of_backend(TORCH, full)
    parts = full.to(torch.float64).leaves()
    state: Tensor | None = parts["initial"]
    outputs: list[Tensor] = []
    for start, stop in ((0, cut), (cut, 150)):
        bounds = torch.tensor([0, stop - start])
        q, k, v, g, beta = (parts[name][:, start:stop] for name in ("q", "k", "v", "g", "beta"))
        out, state = TORCH.chunk_rule(
            q, k, v, g, beta,
            cu_seqlens=bounds, cu_seqlens_cpu=bounds, initial_state=state, output_final_state=True,
        )  # fmt: skip
        outputs.append(out)
    assert state is not None
    generator = torch.Generator().manual_seed(1)
    actual = (torch.cat(outputs, 1), state)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in actual]
    sum((t * w).sum() for t, w in zip(actual, weights, strict=True)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(actual[0], right.out, rtol=EXACT, atol=EXACT)
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor.grad, right.grads[name], rtol=1e-11, atol=1e-11)


def test_padding_is_not_read() -> None:
    case = make_case(CaseShape((9, 70), tail=6), seed=3)
    clean = of_backend(TORCH, case)
    dirty = case.to(torch.float64)
    with torch.no_grad():
        for tensor in (dirty.q, dirty.k, dirty.v, dirty.g, dirty.beta):
            tensor[:, case.cu_seqlens[-1] :] = float("nan")
    actual = of_backend(TORCH, dirty)
    assert torch.equal(actual.out, clean.out) and not actual.out[:, case.cu_seqlens[-1] :].any()
    assert all(torch.equal(actual.grads[name], grad) for name, grad in clean.grads.items())


def test_no_grad_saves_nothing_and_gives_the_same_output() -> None:
    case = make_case(CaseShape((100, 3)))
    with torch.no_grad():
        out, final = TORCH.chunk_rule(
            case.q, case.k, case.v, case.g, case.beta,
            cu_seqlens=case.bounds, cu_seqlens_cpu=case.bounds, initial_state=case.initial,
        )  # fmt: skip
    assert final is None and out.grad_fn is None
    assert torch.equal(out, of_backend(TORCH, case).out)


def _no_cross_decay(x: ChunkInputs, *args: object) -> object:
    return _FORWARD(replace(x, decay=torch.ones_like(x.decay)), *args)


def _no_mask(lower: Tensor) -> Tensor:
    return torch.linalg.inv(torch.eye(lower.shape[-1], dtype=lower.dtype) + lower)


def _drop_state_gradient(*args: object) -> object:
    grads = _BACKWARD(*args)
    return replace(grads, state=torch.zeros_like(grads.state))


def _other_writes(x: ChunkInputs, block: chunk_forward.ChunkBlock, *args: object) -> object:
    return _GRADIENTS(x, replace(block, new_values=block.new_values.roll(1, 0)), *args)


_FORWARD: Callable[..., object] = chunk_forward._scan
_BACKWARD: Callable[..., chunk_backward.Gradients] = chunk_backward.backward
_GRADIENTS: Callable[..., object] = chunk_backward._gradients
FAULTS: dict[str, tuple[object, str, object, str]] = {
    "the state does not decay": (chunk_forward, "_scan", _no_cross_decay, "out"),
    "the diagonal is solved for": (chunk_forward, "unit_lower_inverse", _no_mask, "out"),
    "another chunk's writes": (chunk_backward, "_gradients", _other_writes, "q"),
    "the state's gradient is dropped": (torch_chunk, "backward", _drop_state_gradient, "initial"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong, part = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    case = make_case(CaseShape((150, 70)))
    assert errors(of_backend(TORCH, case), oracle(case))[part] > 1e-3


@pytest.mark.parametrize("bounds", [[1, 5], [0, 4, 3], [0, 9], []])
def test_impossible_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        packing.lengths(torch.tensor(bounds, dtype=torch.int64), 8)


def test_wrong_shapes_and_unknown_arguments_are_refused() -> None:
    case = make_case(CaseShape((5,), heads=2, groups=2))
    bounds = case.bounds
    with pytest.raises(ValueError, match="HV a multiple of H"):
        TORCH.chunk_rule(
            case.q, case.k, case.v[:, :, :3], case.g[:, :, :3], case.beta[:, :, :3],
            cu_seqlens=bounds, cu_seqlens_cpu=bounds,
        )  # fmt: skip
    with pytest.raises(ValueError, match="initial_state"):
        TORCH.chunk_rule(
            case.q, case.k, case.v, case.g, case.beta,
            cu_seqlens=bounds, cu_seqlens_cpu=bounds, initial_state=case.v.new_zeros(2, 4, 8, 8),
        )  # fmt: skip
    with pytest.raises(TypeError, match="head_first"):
        TORCH.chunk_rule(
            case.q, case.k, case.v, case.g, case.beta,
            cu_seqlens=bounds, cu_seqlens_cpu=bounds, head_first=True,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
