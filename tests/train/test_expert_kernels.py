"""The C products of experts against float64 definitions: values and gradients, on any number of threads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.megatron_cpu import experts
from slime_like_plugins.megatron_cpu.experts import ExpertLinearFunction, expert_kernels
from slime_like_plugins.megatron_cpu.kernels import SOURCE
from slime_like_plugins.sglang_cpu.build import COMPILERS
from tests.hypothesis_examples import num_examples
from tests.train.test_grouped_products import COUNTS, DTYPES, SEEDS, assert_agree, one_by_one, random

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="no C compiler")
SIZES = st.integers(1, 40).map(lambda n: 2 * n)


def in_c(counts: Sequence[int], rows: Tensor, *weights: Tensor) -> Tensor:
    out = ExpertLinearFunction.apply(rows, tuple(counts), expert_kernels(), *weights)
    assert isinstance(out, Tensor)
    return out


@settings(deadline=None, max_examples=num_examples(60))
@given(counts=COUNTS, inputs=SIZES, outputs=SIZES, dtype=DTYPES, seed=SEEDS)
@example(counts=[0, 0], inputs=4, outputs=2, dtype=torch.float32, seed=0)
@example(counts=[0, 1601, 3], inputs=34, outputs=200, dtype=torch.bfloat16, seed=0)  # several blocks in each dimension
@example(counts=[770, 0, 5], inputs=66, outputs=210, dtype=torch.float32, seed=1)
def test_products_and_gradients(counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> None:
    tensors = random(seed, (sum(counts), inputs), *[(outputs, inputs)] * len(counts), dtype=dtype)
    terms = max(inputs, outputs, *counts)
    assert_agree(lambda *x: in_c(counts, *x), one_by_one(counts), tensors, terms=terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_threads_nor_on_other_rows(dtype: torch.dtype) -> None:
    counts = [700, 0, 37, 1]
    rows, *weights = (x.detach() for x in random(0, (sum(counts), 48), *[(50, 48)] * 4, dtype=dtype))
    grad = torch.randn(sum(counts), 50).to(dtype)
    before, results = torch.get_num_threads(), list[tuple[Tensor, Tensor]]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = expert_kernels().products(rows, counts, weights, transpose=True)
            results.append((out, expert_kernels().gradients(grad, rows, counts)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    alone = expert_kernels().products(rows[5:6], [1], weights[:1], transpose=True)
    assert torch.equal(alone, results[0][0][5:6])


def test_inputs_of_other_shapes_strides_and_dtypes_are_refused() -> None:
    rows, weight = torch.ones(4, 8), torch.ones(6, 8)
    for x, counts, weights in (
        (rows, [5], [weight]),
        (rows, [4, 0], [weight]),
        (rows, [-1, 5], [weight, weight]),
        (rows.T.contiguous().T, [4], [weight]),
        (rows, [4], [weight.double()]),
        (rows, [4], [weight[:, :4]]),
    ):
        with pytest.raises(AssertionError):
            expert_kernels().products(x, counts, weights, transpose=True)
    with pytest.raises(AssertionError):
        expert_kernels().gradients(rows[:3], rows, [4])


def test_torch_multiplies_bfloat16_of_odd_sizes() -> None:
    rows, weight = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(5, 8, dtype=torch.bfloat16)
    assert not expert_kernels().multiplies(rows, weight)
    assert not expert_kernels().multiplies(rows.double(), weight.double())


def test_constants_equal_those_of_the_source() -> None:
    source = (SOURCE / "units.h").read_text()
    for name in ("GRAD_OUTPUTS", "GRAD_ROWS"):
        assert re.search(rf"#define {name} {getattr(experts, name)}\b", source)
    assert f"#define LANES {experts.COLUMNS // 2}\n" in (SOURCE / "rows.h").read_text()
