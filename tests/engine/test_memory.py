"""Memory of a running engine beside the planner's prediction."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from slime_like.planner.config_json import read_shape
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.host import host_engine, host_tokens
from tests.engine.conftest import ADMIN_KEY, Engine, Models

pytestmark = pytest.mark.engine


def resident_bytes(group: int) -> int:
    """Return the resident memory of every process of a process group."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
                fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                total += int(fields["VmRSS"].split()[0]) * 1024
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended meanwhile
    return total


def test_capacity_and_resident_memory_are_within_a_tenth_of_the_prediction(engine: Engine, models: Models) -> None:
    shape = read_shape("model", str(models.paths["A"]))
    settings = EngineSettings(gpus=1, weights="float32", kv_bytes=4, max_running=64)
    request = Request(f"{engine.server.url}/get_server_info", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    with urlopen(request, timeout=60) as reply:
        info = json.load(reply)
    tokens = host_tokens(shape, settings, available=4 * 2**30, limit=4_096)
    assert tokens == pytest.approx(int(info["max_total_num_tokens"]), rel=0.1)
    predicted = host_engine(shape, settings, tokens).total
    assert resident_bytes(engine.server.pid) == pytest.approx(predicted, rel=0.1)
