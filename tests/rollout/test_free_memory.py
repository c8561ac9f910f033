"""An engine that restarts next to a trainer gets a KV cache of the same size as at its first start."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.cluster.workers import engine_actor
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine.free_memory import FIRST_FREE, free_gib
from slime_like.rollout.engine.server import DECODE_LINE, EngineServer
from slime_like_plugins.kv_capacity import size

SPEC = EngineSpec("model", "cuda", "bfloat16", 1, 64, 0, "/nowhere/engine.log", 10, 10)


def kv_cache(free: float, baseline: float, static: float, weights: float) -> float:
    """Return the GiB that SGLang gives the cache (``_profile_available_bytes`` in ``kv_cache_configurator.py``)."""
    return free - weights - baseline * (1 - static)


@given(st.floats(0.3, 0.95), st.floats(-1, 1), st.floats(20, 180))
def test_a_restarted_engine_gets_the_cache_of_its_first_start(static: float, share: float, first: float) -> None:
    """The cache has the same size if the trainer's memory fits in the share that SGLang does not use.

    A negative ``share`` is memory that another process held at the first start and has released since.
    """
    trainer_bytes = share * ((1 - static) * first - size.MIN_SHARE * first)
    free, weights = first - trainer_bytes, 0.1 * first
    baseline = size.baseline_of_first_start(free, first, static)
    expected = kv_cache(first, first, static, weights)
    assert kv_cache(free, baseline, static, weights) == pytest.approx(expected, abs=1e-6)
    own = kv_cache(free, free, static, weights)
    assert (own - expected) * math.copysign(1, share) <= 1e-6, (
        "SGLang's own cache is smaller if memory was taken, larger if released"
    )


def test_a_trainer_that_takes_more_than_its_share_is_left_a_margin() -> None:
    baseline = size.baseline_of_first_start(20.0, 80.0, 0.7)
    assert 20.0 - kv_cache(20.0, baseline, 0.7, 0.0) == pytest.approx(0.02 * 80)


@pytest.mark.parametrize(("first", "expected"), [("", 60.0), ("80", 40.0)])
def test_the_hook_reports_free_memory_and_applies_that_of_the_first_start(
    first: str, expected: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FIRST_FREE, first)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_schedule = lambda: SimpleNamespace(mem_fraction_static=0.5)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    measured_gib = size.measure(lambda **_: 60.0, device="cuda", is_draft_worker=False)
    assert measured_gib == expected
    assert free_gib("other\n" + capsys.readouterr().err + "other") == 60.0
    assert size.measure(lambda **_: 60.0, device="cuda", is_draft_worker=True) == 60.0
    assert capsys.readouterr().err == ""


def test_the_log_of_an_engine_states_the_free_memory(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert (
        free_gib("slime_like: 79.250000 GiB free before the load\nslime_like: 78.5 GiB free before the load\n") == 78.5
    )
    log.write_text("slime_like: 70.0 GiB free before the load\n")
    spec = EngineSpec("model", "cuda", "bfloat16", 1, 64, 0, str(log), 10, 10)
    server = EngineServer(spec, admin_key="key")
    assert server.free_before_load() == 70.0
    server._log_begin = len(log.read_bytes())
    assert server.free_before_load() is None
    assert EngineServer(SPEC, admin_key="key").free_before_load() is None


def test_the_log_of_an_earlier_engine_does_not_state_the_decoding_method(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"{DECODE_LINE}C kernels\n")
    server = EngineServer(replace(SPEC, log_path=str(log)), admin_key="key")
    assert server.decode_method() == "C kernels"
    server._log_begin = len(log.read_bytes())
    assert server.decode_method() == ""


class ColocatedServer:
    """Server of an engine that finds 79 GiB free at its first start and 50 GiB at later starts."""

    def __init__(self, first_free_gib: float | None) -> None:
        self.first_free_gib = first_free_gib
        self.url = "http://127.0.0.1:1"

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wait_ready(self) -> None: ...

    def exit_summary(self) -> str:
        return "killed"

    def free_before_load(self) -> float:
        return 79.0 if self.first_free_gib is None else 50.0


def test_each_restarted_server_knows_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[ColocatedServer] = []

    def make(spec: EngineSpec, *, first_free_gib: float | None, **_: Any) -> ColocatedServer:
        servers.append(ColocatedServer(first_free_gib))
        return servers[-1]

    monkeypatch.setattr(engine_actor, "prepare_process", lambda *_: None)
    monkeypatch.setattr(engine_actor, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(engine_actor, "EngineServer", make)
    actor = EngineActor("engine 0", SPEC, "key", "stacks", {})
    actor.restart()
    actor.restart()
    assert [server.first_free_gib for server in servers] == [None, 79.0, 79.0]
