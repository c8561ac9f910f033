"""Remote experts are chosen by count, list or measured load; a load file that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.expert_load import read_load
from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.remote_experts.model import ROWS, RemoteModel
from slime_like_plugins.remote_experts.placement import LoadRecord, remote_ids
from slime_like_plugins.remote_experts.routing import ExpertRows


def test_placement_by_count_list_and_measured_load(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    record = LoadRecord()
    for ids in ([[0, 1], [0, -1]], [[3, 0], [1, 3]]):
        record.add(5, np.array(ids, np.int32), 4)
    record.write(path)
    assert json.loads(path.read_text()) == {"tokens": {"5": [3, 2, 0, 2]}} and len([*tmp_path.iterdir()]) == 1
    assert read_load(path) == {5: [3, 2, 0, 2]}
    assert remote_ids(RemoteOptions(count=2), 5, 4) == (2, 3)
    assert remote_ids(RemoteOptions(experts=(3, 0)), 5, 4) == (0, 3)
    assert remote_ids(RemoteOptions(count=2, load_file=str(path)), 5, 4) == (1, 2)
    for options, layer, message in (
        (RemoteOptions(count=2, load_file=str(path)), 6, "has no experts of layer 6"),
        (RemoteOptions(count=4), 5, "at least one must stay in the engine: set .* to at most 3"),
        (RemoteOptions(experts=(4,)), 5, "layer 5 has 4 experts: give ids from 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            remote_ids(options, layer, 4)
    path.write_text('{"tokens": {"5": [1, -1, 0, 0]}}')
    with pytest.raises(ConfigError, match="not a list of counts"):
        read_load(path)


def test_an_engine_records_the_load_of_its_routed_experts(tmp_path: Path) -> None:
    """A shared expert that SGLang appends to the routed ones is not counted, as it cannot be remote."""
    path = tmp_path / "load.json"
    model = RemoteModel(RemoteOptions(count=2, record_load=str(path)), 0, 2)
    matrices = {"w13_weight": torch.ones(3, 12, 8), "w2_weight": torch.ones(3, 8, 6)}
    layer: Any = SimpleNamespace(layer_id=5, num_experts=5, num_global_routed_experts=4, **matrices)
    setattr(layer, ROWS, ExpertRows(5, (1, 2)))
    topk = SimpleNamespace(topk_ids=torch.tensor([[0, 4], [3, 4], [0, 4]]), topk_weights=torch.ones(3, 2))
    for _ in range(2):
        model.forward(layer, torch.ones(3, 8), topk, lambda ids: ids)
    model.record_load()
    assert read_load(path) == {5: [4, 0, 0, 2]}
    assert remote_ids(RemoteOptions(count=2, load_file=str(path)), 5, 4) == (1, 2)
