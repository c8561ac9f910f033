"""Benchmark of matrix products: prints a table, and ends with an error if C and torch disagree."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.kernels import CKernels
from tests.engine.c_kernels import has_products

products: Any = importlib.import_module("benchmarks.products")
pytestmark = pytest.mark.skipif(not has_products(), reason="no C compiler, or a CPU without its products")


def test_every_product_has_three_rates(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert products.main(["--rows", "3", "--rounds", "3", "--cold-mb", "0"]) == 0
    rows = re.findall(
        r"^\| .* \| 3 \| (?:bfloat16|float32) \| (\d+) \| (\d+) \| (\d+) \|$", capsys.readouterr().out, re.M
    )
    assert len(rows) == 2 * len(products.SHAPES)
    assert all(int(rate) > 0 for row in rows for rate in row)
    assert torch.get_num_threads() == threads


def test_a_wrong_product_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    product = CKernels.product

    def wrong(self: CKernels, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        return product(self, x, packed, bias, out).mul_(1.1)

    monkeypatch.setattr(CKernels, "product", wrong)
    with pytest.raises(SystemExit, match="disagree"):
        products.main(["--rows", "3", "--rounds", "1", "--cold-mb", "0"])
