"""Updates of a model with latent attention: parts of fused projections load together, derived weights are checked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like_plugins.weight_commit import hooks, latent
from slime_like_plugins.weight_commit.latent import PairedLoader

Q, KV, OTHER = (f"model.layers.1.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))


class Loader:
    """Weight loader that records the weights of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def __call__(self, weights: Any) -> None:
        self.calls.append({name: float(weight) for name, weight in weights})


@pytest.mark.parametrize("first", [Q, KV])
def test_parts_of_a_projection_are_loaded_together(first: str) -> None:
    second = KV if first == Q else Q
    loader = Loader()
    paired = PairedLoader(loader)
    memory = torch.tensor(1.0)
    paired([(first, memory), (OTHER, torch.tensor(2.0))])
    memory.fill_(9.0)  # the sender reuses its memory
    paired([(second, torch.tensor(3.0))])
    assert loader.calls == [{OTHER: 2.0}, {second: 3.0, first: 1.0}]
    paired([(first, torch.tensor(4.0)), (second, torch.tensor(5.0))])
    assert loader.calls[2:] == [{second: 5.0, first: 4.0}]


def test_parts_of_an_abandoned_update_are_dropped() -> None:
    loader = Loader()
    model: Any = SimpleNamespace(load_weights=PairedLoader(loader))
    model.load_weights([(Q, torch.tensor(1.0))])
    latent.drop_waiting(model)
    model.load_weights([(KV, torch.tensor(2.0))])
    assert loader.calls == [{}, {}]


class LatentLayer(torch.nn.Module):
    """Layer with a derived weight that is not a parameter, as in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(2, 3, bias=False)
        self.w_kc = self.kv_b_proj.weight.detach().t().clone()
        self.w_vc: Tensor | None = None

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Do nothing: the test writes the parameters directly."""


@pytest.mark.parametrize("stale", [False, True])
def test_a_commit_is_refused_if_a_derived_weight_is_stale(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LatentLayer()
    manager: Any = SimpleNamespace(
        _session=SimpleNamespace(selector="all"),
        _select_runners=lambda _: [("target", SimpleNamespace(model=layer))],
        tp_cpu_group=None,
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda outputs, value, group: outputs.__setitem__(0, value)
    )
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.managers.io_struct",
        SimpleNamespace(EndWeightUpdateReqOutput=SimpleNamespace),
    )
    succeeded = SimpleNamespace(success=True, message="")
    hooks.begin_weight_update(lambda *_: succeeded, manager, SimpleNamespace(selector="all"))
    manager._session = SimpleNamespace(selector="all")
    with torch.no_grad():
        layer.kv_b_proj.weight.fill_(2.0)
        if not stale:
            layer.w_kc.copy_(layer.kv_b_proj.weight.t())
    output = hooks.end_weight_update(lambda *_: succeeded, manager, None)
    assert output.success != stale
    assert not stale or "w_kc (6 of 6 elements)" in output.message
