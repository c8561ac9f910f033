"""Compare SGLang's Triton kernels for DCP with fakes: ``TRITON_INTERPRET=1 python -m tests.engine.dcp_kernels``."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime_like.rollout.engine.sglang_imports import sglang_imports

with sglang_imports():
    from sglang.kernels.ops.attention.dcp_kernels import create_triton_kv_indices_for_dcp_triton, dcp_lse_combine_triton
    from sglang.srt.mem_cache.memory_pool import masked_set_kv_buffer_kernel

from slime_like_plugins.dcp.merge import merge
from tests.engine.dcp_case import sharded_case
from tests.engine.flashinfer_case import RowsKernel


def compare_rows() -> None:
    """Compare the pool rows of a rank's tokens."""
    case = sharded_case([(1, 30), (1, 0), (1, 1)], 2, 4, decode=True, dim=16)
    lens, indptr = torch.tensor([15, 0, 1]), torch.tensor([0, 15, 15, 16], dtype=torch.int32)
    outs = [torch.zeros(20, dtype=torch.int32) for _ in range(2)]
    kernels: tuple[Any, ...] = (RowsKernel(), create_triton_kv_indices_for_dcp_triton)
    for kernel, out in zip(kernels, outs, strict=True):
        kernel[(3,)](case.table, case.rows, lens, indptr, None, out, case.table.stride(0), 2, 1)
    assert outs[0].any()
    assert outs[0].tolist() == outs[1].tolist()


def compare_writes() -> None:
    """Compare a masked write with an indexed one."""
    case = sharded_case([(1, 30)], 2, 4, decode=True, dim=16)
    slots, (k, v) = case.slots_L, (t[:, None] for t in (case.keys, case.values))
    pools, stored_mask = torch.zeros(4, 401, 1, 16), case.slots_L % 2 == 1
    pools[0, slots[stored_mask] // 2], pools[1, slots[stored_mask] // 2] = k[stored_mask], v[stored_mask]
    strides = (*k.stride()[:2], *v.stride()[:2], pools.stride(1), pools.stride(1))
    kernel: Any = masked_set_kv_buffer_kernel
    kernel[(len(k),)](k, v, pools[2], pools[3], slots // 2, stored_mask, *k.shape, 128, *strides)
    assert pools[0].any()
    torch.testing.assert_close(pools[2:], pools[:2], rtol=0, atol=0)


def compare_merges() -> None:
    """Compare the merge after an all-to-all, in which a rank has no token of the first request."""
    parts, lses = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 4) * 5
    parts[1, 0], lses[1, 0] = 0, -math.inf
    merged, _ = dcp_lse_combine_triton(parts, lses, is_lse_base_on_e=True)
    torch.testing.assert_close(merged, merge(parts, lses)[0], atol=1e-6, rtol=1e-5)


if __name__ == "__main__":
    compare_rows()
    compare_writes()
    compare_merges()
