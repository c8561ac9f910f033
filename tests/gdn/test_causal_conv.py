"""The torch convolution against its definition, one token at a time in float64: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.qwen_gdn import causal_conv
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN
from tests.gdn.recurrence import conv_reference

Inputs = tuple[Tensor, Tensor, Tensor | None, tuple[int, ...]]


def make(lengths: list[int], width: int, *, tail: int = 0, halo: bool = False, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    channels = 3
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    before = leaf(len(lengths), width - 1, channels) if halo else None
    return leaf(1, bounds[-1] + tail, channels), leaf(channels, width), before, tuple(bounds)


def run(inputs: Inputs, silu: bool) -> Tensor:
    x, weight, halo, bounds = inputs
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    activation = "silu" if silu else None
    return TorchGDN().causal_conv(
        x, weight, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens, activation=activation, halo=halo
    )


def results(inputs: Inputs, out: Tensor) -> list[Tensor]:
    leaves = [t for t in inputs[:3] if t is not None]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)]


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_values_and_gradients(lengths: list[int], width: int, tail: int, halo: bool, silu: bool) -> None:
    inputs = make(lengths, width, tail=tail, halo=halo)
    found = results(inputs, run(inputs, silu))
    x, weight, before, bounds = inputs
    right = results(inputs, conv_reference(x, weight, bounds, before, silu) + 0 * (x.sum() + weight.sum()))
    for mine, true in zip(found, right, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_a_window_that_reaches_into_the_sequence_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make([4, 5], 4)
    right = run(inputs, silu=True)
    monkeypatch.setattr(causal_conv, "lengths", lambda *_: (9,))
    assert (run(inputs, silu=True) - right).abs().max() > 0.1


def test_a_split_with_its_halo_changes_nothing() -> None:
    x, weight, _, _ = make([9], 4)
    whole = run((x, weight, None, (0, 9)), silu=True)
    first = run((x[:, :5], weight, None, (0, 5)), silu=True)
    second = run((x[:, 5:], weight, x[:, 2:5], (0, 4)), silu=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-14, atol=1e-14)


def test_sixteen_bits_in_sixteen_bits_out() -> None:
    x, weight, _, bounds = make([9, 3], 4)
    low = (x.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_(), None, bounds)
    out = run(low, silu=True)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and low[0].grad is not None and low[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), run((x, weight, None, bounds), silu=True), rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, _, bounds = make([4], 4)
    cu_seqlens = torch.tensor(bounds)
    with pytest.raises(ValueError, match="gelu"):
        TorchGDN().causal_conv(x, weight, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens, activation="gelu")
    with pytest.raises(ValueError, match=r"\[D, W\]"):
        TorchGDN().causal_conv(x, weight.T, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens)
