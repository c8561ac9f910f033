"""KV capacity and resident memory of running engines compared with the planner's prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from slime_like.planner.config_json import read_shape
from slime_like.planner.constants import GIB, HOST_SCHEDULER
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.host import host_engine, host_pool
from slime_like.planner.table import MemoryTable
from slime_like.util.deadline import scale
from tests.engine.conftest import ADMIN_KEY, Models, RunningEngine, make_sampling, prompt, start

pytestmark = pytest.mark.engine

MEMORY, FRACTION = 4 * GIB, 0.2
NO_LIMIT = 2**31 - 1
# SGLang sizes the cache by free memory, which other processes of this machine change while the engine starts. In an
# engine with this module on its path, free memory is that of a machine with MEMORY bytes and no other process.
ALONE = f"""
import psutil

_virtual_memory = psutil.virtual_memory


def _alone():
    return _virtual_memory()._replace(available={MEMORY} - psutil.Process().memory_info().rss)


psutil.virtual_memory = _alone
"""
SMALL = EngineSettings(gpus=1, weights="float32", kv_bytes=4, max_running=64, max_tokens=4_096)
SIZED = replace(SMALL, max_tokens=NO_LIMIT, static=FRACTION)


@pytest.fixture(scope="module")
def sized(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningEngine, Path]]:
    """Yield an engine with a model of some 100 MiB, whose cache SGLang sizes, and the model's folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("sized")
    (folder / "sitecustomize.py").write_text(ALONE)
    config = Qwen3Config.from_pretrained(models.paths["A"])
    config.update({"hidden_size": 768, "intermediate_size": 3_072})
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    options = {"mem_fraction_static": FRACTION, "max_total_tokens": NO_LIMIT}
    engines = start(Models({"A": folder / "model"}, {}), folder, 1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        engine = next(engines)
    yield engine, folder / "model"
    next(engines, None)  # stops the engine


def reported_tokens(engine: RunningEngine) -> int:
    """Return the engine's own max_total_num_tokens."""
    request = Request(f"{engine.server.url}/get_server_info", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    with urlopen(request, timeout=60 * scale()) as reply:
        return int(json.load(reply)["max_total_num_tokens"])


def resident_bytes(engine: RunningEngine) -> int:
    """Return the resident memory of every process of an engine, after a request."""
    engine.run(engine.client.generate(prompt(8), [0], make_sampling()))
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == engine.server.pid:
                fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                total += int(fields["VmRSS"].split()[0]) * 1024
        except (ProcessLookupError, FileNotFoundError):
            continue  # the process has ended
    return total


def predicted(model: Path, settings: EngineSettings) -> tuple[int, MemoryTable]:
    """Return the planner's KV capacity and resident memory for ``MEMORY`` bytes less its constant for the scheduler."""
    shape = read_shape("model", str(model))
    pool = host_pool(shape, settings, MEMORY - HOST_SCHEDULER.value)
    return pool.tokens, host_engine(shape, settings, pool)


def test_capacity_and_resident_memory_are_within_a_tenth_of_the_prediction(
    engine: RunningEngine, sized: tuple[RunningEngine, Path], models: Models
) -> None:
    larger_engine, model = sized
    small_tokens, small_table = predicted(models.paths["A"], SMALL)
    tokens, table = predicted(model, SIZED)
    assert reported_tokens(engine) == small_tokens == SMALL.max_tokens
    assert reported_tokens(larger_engine) == pytest.approx(tokens, rel=0.1)
    small_bytes, num_bytes = resident_bytes(engine), resident_bytes(larger_engine)
    assert small_bytes == pytest.approx(small_table.total, rel=0.1)
    assert num_bytes == pytest.approx(table.total, rel=0.1)
    # The measured constants cancel. Weights, their packed form and the KV cache remain.
    unpacked = 0.0 if "packed by" in larger_engine.server.decode_method() else table.of("packed weights")
    assert num_bytes - small_bytes == pytest.approx(table.total - unpacked - small_table.total, rel=0.1)
