"""torch convolution against its definition, one token at a time in float64: values and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like_plugins.qwen_gdn import causal_conv
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN
from tests.gdn.recurrence import conv_errors, convolve, make_conv
from tests.hypothesis_examples import num_examples

TORCH = TorchGDN()


@settings(max_examples=num_examples(30))
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_values_and_gradients(lengths: list[int], width: int, tail: int, halo: bool, silu: bool) -> None:
    largest_errors = conv_errors(TORCH, make_conv(lengths, width, tail=tail, halo=halo), torch.float64, silu=silu)
    assert max(largest_errors) <= 1e-12, largest_errors


def test_a_window_into_the_previous_sequence_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_conv([4, 5], 4)
    monkeypatch.setattr(causal_conv, "lengths", lambda *_: (9,))
    assert min(conv_errors(TORCH, case, torch.float64)) > 1e-2


def test_a_split_with_a_halo_changes_nothing() -> None:
    case = make_conv([9], 4)
    first = replace(case, x=case.x[:, :5], cu_seqlens=(0, 5))
    second = replace(case, x=case.x[:, 5:], halo=case.x[:, 2:5], cu_seqlens=(0, 4))
    parts = torch.cat([convolve(TORCH, first), convolve(TORCH, second)], 1)
    torch.testing.assert_close(parts, convolve(TORCH, case), rtol=1e-14, atol=1e-14)


def test_padding_is_not_read() -> None:
    case = make_conv([4, 2], 3, tail=3)
    clean = convolve(TORCH, case)
    with torch.no_grad():
        case.x[:, 6:] = float("nan")
    actual = convolve(TORCH, case)
    assert torch.equal(actual, clean) and not actual[:, 6:].any()
    actual.sum().backward()
    assert case.x.grad is not None and case.x.grad.isfinite().all() and not case.x.grad[:, 6:].any()


def test_bfloat16_inputs_give_bfloat16_results() -> None:
    case = make_conv([9, 3], 4)
    low = case.to(torch.bfloat16)
    out = convolve(TORCH, low)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and low.x.grad is not None and low.x.grad.dtype == torch.bfloat16
    assert max(conv_errors(TORCH, case, torch.bfloat16)) <= 2e-2


def test_invalid_arguments_are_refused() -> None:
    case = make_conv([4], 4)
    cu_seqlens = torch.tensor(case.cu_seqlens)
    with pytest.raises(ValueError, match="gelu"):
        TORCH.causal_conv(case.x, case.weight, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens, activation="gelu")
    with pytest.raises(ValueError, match=r"\[D, W\]"):
        TORCH.causal_conv(case.x, case.weight.T, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens)
