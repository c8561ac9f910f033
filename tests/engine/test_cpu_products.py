"""Packed matrix products use the current weights, even after a change. No engine runs, and SGLang is not used."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slime_like_plugins.sglang_cpu import products
from slime_like_plugins.sglang_cpu.products import Products
from tests.engine.c_kernels import C, has_products
from tests.hypothesis_examples import num_examples

needs_products = pytest.mark.skipif(not has_products(), reason="no C compiler, or a CPU without its products")


class TwoLayers(nn.Module):
    """Two linear layers, one with a bias. Like SGLang's, their loader does not increase the version counters."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(96, 40, dtype=dtype), nn.Linear(40, 64, bias=False, dtype=dtype)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, value in weights:
            parameters[name].data.copy_(value)


def outputs(product: Products, model: TwoLayers, rows: int = 7) -> list[Tensor]:
    product.renew()
    outputs_of_layers: list[Tensor] = []
    for layer in model.layers:
        weight: Tensor = layer.weight  # pyright: ignore[reportAssignmentType]
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        outputs_of_layers.append(product(x, layer, torch.empty(rows, weight.shape[0], dtype=x.dtype)))
    return outputs_of_layers


def assert_current(product: Products, model: TwoLayers) -> None:
    unpacked_products = Products(model, [])
    for rows in (1, 7, 130):
        for actual, expected in zip(
            outputs(product, model, rows), outputs(unpacked_products, model, rows), strict=True
        ):
            torch.testing.assert_close(actual, expected, atol=2**-7, rtol=2**-7)


@torch.no_grad()
@pytest.mark.parametrize("by_c", [False, True])
def test_every_way_to_write_a_weight_is_detected(by_c: bool) -> None:
    if not (has_products() if by_c else products.can_pack()):
        pytest.skip("this CPU has no such products of bfloat16")
    model = TwoLayers()
    product = Products(model, list(model.layers), c=C() if by_c else None)
    assert product.packed_by == ("C" if by_c else "oneDNN")
    assert_current(product, model)
    model.load_weights([("layers.0.weight", torch.randn(40, 96))])
    assert_current(product, model)
    for parameter in model.parameters():  # as a push does when it begins
        parameter.fill_(float("nan"))
    assert all(out.isnan().all() for out in outputs(product, model))
    for parameter in model.parameters():
        parameter.data.normal_()
    model.load_weights([])
    assert_current(product, model)
    model.layers[0].weight = nn.Parameter(torch.randn(40, 96).bfloat16())  # a replaced parameter
    assert_current(product, model)


@torch.no_grad()
def test_weights_that_are_not_packed_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MAX_BYTES", 1000)
    model = TwoLayers()
    product = Products(model, list(model.layers))
    assert product.packed_by == ""
    assert_current(product, model)
    float32_model = TwoLayers(torch.float32)
    assert Products(float32_model, list(float32_model.layers)).packed_by == ""


@needs_products
@pytest.mark.skipif(not products.can_pack(), reason="oneDNN does not multiply bfloat16 on this CPU")
def test_the_layers_are_packed_if_the_head_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TwoLayers()
    head = nn.Linear(64, 100, dtype=torch.bfloat16)
    packed_model = Products(model, list(model.layers), head, C())
    assert packed_model.packed_by == "C" and packed_model.bytes == 2 * (40 * 96 + 64 * 40 + 100 * 64)
    monkeypatch.setattr(products, "MAX_BYTES", packed_model.bytes - 1)
    assert Products(model, list(model.layers), head, C()).packed_by == "oneDNN"


@needs_products
@settings(deadline=None, max_examples=num_examples(80))
@given(
    rows=st.integers(1, 130),
    depth=st.integers(1, 80),
    columns=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_in_c_equal_float64_up_to_rounding(
    rows: int, depth: int, columns: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    """Results match float64 within the rounding of float32 sums and of the result, for any shape."""
    depth *= 2 if dtype is torch.bfloat16 else 1
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, depth, generator=random).to(dtype) for n in (rows, columns))
    bias = torch.randn(columns, generator=random).to(dtype) if has_bias else None
    out = C().product(x, C().pack(weight), bias, torch.full((rows, columns), float("nan"), dtype=dtype))
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    bound = (x.double().abs() @ weight.double().abs().t() + 4) * 2.0**-21
    rounding = exact.abs() * 2.0**-8 if dtype is torch.bfloat16 else torch.zeros_like(exact)
    assert ((out.double() - exact).abs() <= bound + rounding).all()


@needs_products
def test_the_bits_of_a_row_are_independent_of_the_other_rows() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed_weight = C().pack(torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).bfloat16())
    product_of_all_rows = C().product(x, packed_weight, None, torch.empty(200, 70, dtype=x.dtype))
    for first, last in ((0, 1), (3, 16), (50, 199)):
        part = C().product(x[first:last], packed_weight, None, torch.empty(last - first, 70, dtype=x.dtype))
        assert torch.equal(part, product_of_all_rows[first:last])


@needs_products
def test_an_odd_number_of_bfloat16_inputs_is_left_to_torch() -> None:
    """The kernel reads pairs: the last input of a row would be paired with the first of the next row."""
    assert not C().packs(torch.empty(8, 7, dtype=torch.bfloat16))
    assert C().packs(torch.empty(8, 7)) and C().packs(torch.empty(8, 6, dtype=torch.bfloat16))
