"""The C kernel for the experts of a few rows computes what torch computes, and torch replaces it where it does not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_like.util.c_build import SharedObject
from slime_like_plugins.plugin_names import CPU_KERNELS_VARIABLE
from slime_like_plugins.remote_experts import compute, memory
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.shapes import ExpertShapes
from slime_like_plugins.sglang_cpu import expert_sums as sums_module
from slime_like_plugins.sglang_cpu.build import SOURCE
from slime_like_plugins.sglang_cpu.expert_sums import expert_sums_kernel
from tests.remote_experts.workers import reference

NUM_EXPERTS = 6


@pytest.mark.parametrize("experts", [1, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 30])
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
    monkeypatch.setattr(compute, "KERNEL_ROWS", {})  # torch, one expert after the other
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    by_torch = expert_sums(x, ids, weights, w13, w2, lambda: calls.append(1))
    assert len(calls) == len(set(ids[ids >= 0].tolist()))
    np.testing.assert_allclose(sums, by_torch, atol=tolerance * max(1, np.abs(expected.numpy()).max(initial=0)))


def test_engines_without_c_kernels_compute_experts_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("off", "torch"):
        monkeypatch.setenv(CPU_KERNELS_VARIABLE, setting)
        assert expert_sums_kernel.__wrapped__() is None
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "auto")
    monkeypatch.setenv("CC", "/no/compiler")
    assert expert_sums_kernel.__wrapped__() is None


def test_a_kernel_that_cannot_be_loaded_is_replaced_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that is mounted noexec."""
    (tmp_path / "kernels.so").write_bytes(b"not a shared object")
    monkeypatch.setattr(sums_module, "build", lambda: SharedObject(tmp_path / "kernels.so", "cc"))
    assert expert_sums_kernel.__wrapped__() is None


def test_the_workspace_has_the_pairs_that_the_kernel_computes_together() -> None:
    """With a smaller workspace, C would write behind its end."""
    assert f"#define CHUNK {sums_module.CHUNK} " in (SOURCE / "experts.h").read_text()


def test_the_kernel_is_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes longer than the deadline of a request may be."""
    builds: list[int] = []
    monkeypatch.setattr(memory, "expert_sums_kernel", lambda: builds.append(1))
    memory.ExpertMemory(ExpertShapes((0,), (2,), 8, 8, "float32", 64, 2), torch.device("cpu"))
    assert builds


@pytest.mark.slow
def test_several_threads_compute_the_same_bits() -> None:
    """In a process of its own, because torch's number of threads belongs to a process."""
    code = (
        "import torch; from slime_like_plugins.sglang_cpu.expert_sums import expert_sums_kernel; kernel = expert_sums_kernel();"
        "generator = torch.Generator().manual_seed(0);"
        "x, w13, w2 = (torch.randn(size, generator=generator) for size in ((30, 64), (6, 96, 64), (6, 64, 48)));"
        "ids = torch.randint(-1, 6, (30, 4), generator=generator, dtype=torch.int32); weights = torch.rand(30, 4, generator=generator);"
        "print(kernel and hash(kernel(x, ids, weights, w13, w2).numpy().tobytes()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment | {"OMP_NUM_THREADS": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(outputs) == 1 and (outputs != {b"None\n"} or expert_sums_kernel() is None)
