"""Remote experts are chosen by count, list or measured load; a load file that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.remote_experts.placement import LoadRecord, read_load, remote_ids


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
        (RemoteOptions(count=4), 5, "leave at least one"),
        (RemoteOptions(experts=(4,)), 5, "layer 5 has 4 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            remote_ids(options, layer, 4)
    path.write_text('{"tokens": {"5": [1, -1, 0, 0]}}')
    with pytest.raises(ConfigError, match="no list of counts"):
        read_load(path)
