"""Benchmark of a layer of experts: arms that disagree end the script with the difference."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def experts() -> Any:
    """Return the benchmark's module, whose imports take seconds."""
    return importlib.import_module("benchmarks.experts")


def test_an_arm_with_another_output_or_gradient_is_named(experts: Any) -> None:
    hidden = torch.ones(2, 3, requires_grad=True)
    arms: dict[str, Callable[[Tensor], Tensor]] = {experts.BASE: lambda x: 2 * x, "same": lambda x: x + x}
    assert experts.difference(arms, hidden, 1e-5) == ""
    arms["gradient"] = lambda x: x + x.detach()
    assert experts.difference(arms, hidden, 1e-5) == "gradient differs from one by one by 5.0e-01, more than 1e-05"
    arms["gradient"] = lambda x: 2 * x * float("nan")
    assert experts.difference(arms, hidden, 1e-5).startswith("gradient differs from one by one by nan")


def test_a_difference_ends_the_script(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagree(run: object, args: tuple[Any, ...], *, join: bool) -> None:
        (Path(args[2]) / experts.DIFFERENCE).write_text("grouped differs")

    monkeypatch.setattr(experts.mp, "spawn", disagree)
    monkeypatch.setattr(experts, "CPU_ENV", {})
    monkeypatch.setattr(experts, "join_ranks", lambda ranks: None)
    with pytest.raises(SystemExit, match="grouped differs"):
        experts.main([])
