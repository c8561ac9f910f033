"""The C kernel for the experts of a few rows computes what torch computes, and torch replaces it where it does not exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_like_plugins.remote_experts import compute
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.sglang_cpu import KERNELS_VARIABLE
from slime_like_plugins.sglang_cpu.expert_sums import expert_sums_kernel
from tests.remote_experts.workers import reference

NUM_EXPERTS = 6


@pytest.mark.parametrize("experts", [1, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 1, 20])
@pytest.mark.parametrize(("hidden", "inner"), [(16, 16), (64, 32), (40, 24), (6, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_c_kernel_computes_the_sums_of_a_few_rows(
    dtype: torch.dtype, hidden: int, inner: int, num_rows: int, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and intermediate sizes need not be multiples of a vector; id -1 has no expert, and some experts have no row."""
    rng = np.random.default_rng(hidden)
    w13, w2 = (
        torch.from_numpy(rng.standard_normal(shape) / shape[2] ** 0.5).to(dtype)
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    x = torch.from_numpy(rng.standard_normal((num_rows, hidden))).to(dtype)
    ids = rng.integers(-1, experts, (num_rows, 3)).astype(np.int32)
    ids[:, 2] = -1 if experts > 1 else 0
    weights = rng.random(ids.shape).astype(np.float32)
    calls: list[int] = []
    sums = expert_sums(x, ids, weights, w13, w2, lambda: calls.append(1))
    assert expert_sums_kernel() is None or not calls
    expected = reference(x, ids, weights, {"w13": w13, "w2": w2})
    np.testing.assert_allclose(sums, expected, atol=1e-6 * max(1, np.abs(expected.numpy()).max(initial=0)))
    for row in range(num_rows):  # a row's bits do not depend on the batch
        part = slice(row, row + 1)
        assert torch.equal(sums[part], expert_sums(x[part], ids[part], weights[part], w13, w2))
    monkeypatch.setattr(compute, "KERNEL_ROWS", -1)  # torch, one expert after the other
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    by_torch = expert_sums(x, ids, weights, w13, w2, lambda: calls.append(1))
    assert len(calls) == len(set(ids[ids >= 0].tolist()))
    np.testing.assert_allclose(sums, by_torch, atol=tolerance * max(1, np.abs(expected.numpy()).max(initial=0)))


def test_engines_without_c_kernels_compute_experts_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("off", "torch"):
        monkeypatch.setenv(KERNELS_VARIABLE, setting)
        assert expert_sums_kernel.__wrapped__() is None
    monkeypatch.setenv(KERNELS_VARIABLE, "auto")
    monkeypatch.setenv("CC", "/no/compiler")
    assert expert_sums_kernel.__wrapped__() is None
