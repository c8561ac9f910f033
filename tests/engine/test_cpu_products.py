"""Packed products are those of the weights of now, whoever wrote them. No engine, no SGLang."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from slime_like_plugins.sglang_cpu import products
from slime_like_plugins.sglang_cpu.products import Products

needs_packing = pytest.mark.skipif(not products.can_pack(), reason="oneDNN does not multiply bfloat16 on this CPU")


class Model(nn.Module):
    """Two layers, one with bias, and a loader that writes as SGLang's does: behind the version counter's back."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(96, 40, dtype=dtype), nn.Linear(40, 64, bias=False, dtype=dtype)])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        named = dict(self.named_parameters())
        for name, value in weights:
            named[name].data.copy_(value)


def outputs(product: Products, model: Model, rows: int = 7) -> list[Tensor]:
    product.renew()
    found: list[Tensor] = []
    for layer in model.layers:
        weight: Tensor = layer.weight  # pyright: ignore[reportAssignmentType]
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        found.append(product(x, layer, torch.empty(rows, weight.shape[0], dtype=x.dtype)))
    return found


def assert_current(product: Products, model: Model) -> None:
    plain = Products(model, [])
    for rows in (1, 7, 130):
        for mine, theirs in zip(outputs(product, model, rows), outputs(plain, model, rows), strict=True):
            torch.testing.assert_close(mine, theirs, atol=2**-7, rtol=2**-7)


@needs_packing
@torch.no_grad()
def test_every_way_to_write_a_weight_is_seen() -> None:
    model = Model()
    product = Products(model, list(model.layers))
    assert product.packs
    assert_current(product, model)
    model.load_weights([("layers.0.weight", torch.randn(40, 96))])
    assert_current(product, model)
    for parameter in model.parameters():  # as the beginning of a push does
        parameter.fill_(float("nan"))
    assert all(out.isnan().all() for out in outputs(product, model))
    for parameter in model.parameters():
        parameter.data.normal_()
    model.load_weights([])
    assert_current(product, model)


@torch.no_grad()
def test_what_is_not_packed_is_multiplied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MOST_BYTES", 1000)
    model = Model()
    product = Products(model, list(model.layers))
    assert not product.packs
    assert_current(product, model)
    whole = Model(torch.float32)
    assert not Products(whole, list(whole.layers)).packs
