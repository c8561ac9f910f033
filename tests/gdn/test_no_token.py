"""Backends on rows that are all padding: results are 0, or the initial state, and every tensor has a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like_plugins.qwen_gdn.backend import GDNBackend
from slime_like_plugins.qwen_gdn.fla import FlaGDN
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN
from tests.gdn.recurrence import CaseShape, convolve, make_case, make_conv

backends = pytest.mark.parametrize(
    "backend", [TorchGDN(), FlaGDN.__new__(FlaGDN)], ids=lambda backend: backend.name
)  # without tokens, fla's kernels are not called, so its constructor need not import them


@backends
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rule(backend: GDNBackend, dtype: torch.dtype, state: bool) -> None:
    case = make_case(CaseShape((0, 0), groups=2, tail=3, state=state)).to(dtype, wide=("g", "initial"))
    columns = {name: tensor for name, tensor in case.leaves().items() if name != "initial"}
    for column in columns.values():
        column.detach().fill_(math.nan)  # padding may contain anything
    out, final = backend.chunk_rule(
        *columns.values(),
        cu_seqlens=case.bounds,
        cu_seqlens_cpu=case.bounds,
        initial_state=case.initial,
        output_final_state=True,
    )
    assert final is not None and (out.dtype, final.dtype) == (dtype, torch.float32)
    assert torch.equal(out, torch.zeros_like(case.v))
    assert torch.equal(final, torch.zeros_like(final) if case.initial is None else case.initial)
    for result in (out, final):
        for gradient in torch.autograd.grad(result.sum(), list(columns.values()), retain_graph=True):
            assert not gradient.any()
    if case.initial is not None:
        assert not torch.autograd.grad(out.sum(), case.initial, retain_graph=True)[0].any()
        assert torch.equal(torch.autograd.grad(final.sum(), case.initial)[0], torch.ones_like(case.initial))


@backends
@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(backend: GDNBackend, dtype: torch.dtype, halo: bool) -> None:
    case = make_conv((0, 0), 4, tail=3, halo=halo).to(dtype)
    case.x.detach().fill_(math.nan)
    out = convolve(backend, case)
    assert out.dtype == dtype and torch.equal(out, torch.zeros_like(case.x))
    for gradient in torch.autograd.grad(out.sum(), case.leaves()):
        assert not gradient.any()
