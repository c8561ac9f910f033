"""Engines of the benchmark of FlowMLA have the same bytes on each rank; its tables, for measurements made up by the tests."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.engine.connection import KvUsage
from tests.engine.latent_models import config

flow_mla: Any = importlib.import_module("benchmarks.flow_mla")
flow_load: Any = importlib.import_module("benchmarks.flow_load")
flow_prefetch: Any = importlib.import_module("benchmarks.flow_prefetch")
dcp: Any = importlib.import_module("benchmarks.dcp")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with the config of the benchmark's model."""
    config("deepseek_v3", **flow_mla.MODEL).save_pretrained(tmp_path / "A")
    return tmp_path / "A"


def test_engines_have_the_same_bytes_and_the_capacity_of_the_planner(model: Path) -> None:
    """DCP multiplies the tokens, and the attention weights that FlowMLA saves become tokens. SGLang sizes the caches."""
    specs = {name: flow_mla.make_spec(name, model) for name in flow_mla.ARMS}
    assert len({spec.log_path for spec in specs.values()}) == len(specs)
    num_tokens = {name: flow_mla.planned_tokens(spec) for name, spec in specs.items()}
    assert all("max_total_tokens" not in spec.sglang for spec in specs.values())
    row_bytes = 4 * 8 * (64 + 16)  # bytes of one token's latents and rotated keys
    saved_tokens = (flow_mla.sharded_bytes(False) - flow_mla.sharded_bytes(True)) / row_bytes
    assert num_tokens["FlowMLA"] - num_tokens["off"] == pytest.approx(saved_tokens, abs=1)
    assert num_tokens["DCP"] == pytest.approx(2 * num_tokens["off"], abs=2)
    assert num_tokens["both"] == pytest.approx(2 * num_tokens["FlowMLA"], abs=2)


def test_the_table_compares_capacities_and_responses() -> None:
    arms = {
        name: flow_mla.FlowArm(
            (dcp.DcpRound(0.01, 2.0, KvUsage(capacity, capacity, capacity // 100, 0), ((1, 2), (1, last))),),
            210,
            5_000,
            4_000,
        )
        for name, capacity, last in (("off", 200, 3), ("both", 400, 4))
    }
    _, _, plain, both = flow_mla.table(arms)
    assert plain == "| off | 5 | 4 | 200 | 210 (+5.0%) | 2 | 0 | 10.0 | 2 | 2 of 2 |"
    assert both == "| both | 5 | 4 | 400 | 210 (-47.5%) | 4 | 0 | 10.0 | 2 | 1 of 2 |"
    assert "Rounds: 1. Engines ran one after another." in flow_mla.page(
        arms, "Machine: this one.", "python benchmarks/flow_mla.py"
    )


@pytest.mark.parametrize(("counts", "wrong"), [((7, 7), 7), ((None, 7), 7), ((None, None), None)])
def test_a_rank_with_other_bytes_ends_the_benchmark(
    counts: tuple[int | None, ...], wrong: int | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank logs its bytes; None stands for the expected number."""
    expected = flow_mla.sharded_bytes(True)

    class LoggingServer:
        def __init__(self, spec: Any, admin_key: str) -> None:
            lines = [
                f"slime_like FlowMLA shards x: {count or expected} bytes of each rank and at most {rank} while loading\n"
                for rank, count in enumerate(counts)
            ]
            Path(spec.log_path).write_text("".join(lines))
            self.start = self.wait_ready = self.stop = lambda: None

    async def measure(*args: object) -> tuple[()]:
        return ()

    monkeypatch.setattr(flow_mla, "EngineServer", LoggingServer)
    monkeypatch.setattr(flow_mla, "measure", measure)
    if wrong is None:
        arm = flow_mla.run_arm("FlowMLA", model, 1)
        assert (arm.weight_bytes, arm.loading_bytes) == (expected, 1)
    else:
        with pytest.raises(
            SystemExit, match=f"a rank of the engine FlowMLA holds {wrong} bytes .* instead of {expected}"
        ):
            flow_mla.run_arm("FlowMLA", model, 1)


def test_gathers_are_hidden_as_far_as_a_layer_does_not_wait() -> None:
    result = flow_prefetch.PrefetchResult("p2p", 16, 2e-3, 4e-3, 1e-3, 3e-2, 2e-2, 1.5, ())
    assert flow_prefetch.table([result])[-1] == "| p2p | 16 | 2.00 | 4.00 | 1.00 | 75% | 20.0 | 30.0 (1.50) |"


def test_memory_of_loading_is_compared_with_an_engine_without_flow_mla() -> None:
    mib = flow_load.MIB
    lines = flow_load.table({"off": (1200 * mib, 1000 * mib), "p2p": (1010 * mib, 800 * mib)})
    assert lines[2:] == ["| off | 480 | 1000 | 0 | 0 |", "| p2p | 280 | 800 | 200 | 190 |"]


def test_memory_is_anonymous_and_shared_memory_of_a_process() -> None:
    before = flow_load.resident(os.getpid())
    block = bytearray(b"x" * (64 * flow_load.MIB))
    assert flow_load.resident(os.getpid()) - before > 0.9 * len(block)
    assert flow_load.resident(1 << 30) == 0
