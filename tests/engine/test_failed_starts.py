"""Engines that cannot start, forked from a process that has imported SGLang: the error names the cause."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.rollout.engine import environment as engine_environment
from slime_like.rollout.engine import main
from slime_like.util.deadline import Deadline, scale
from tests.e2e.leftovers import MARK, is_marked
from tests.engine.conftest import ADMIN_KEY, Models
from tests.engine.forked_engines import ForkedEngine, ForkedEngineServer

pytestmark = pytest.mark.engine


def error_of_start(spec: EngineSpec) -> str:
    """Return the error of an engine that does not start."""
    server = ForkedEngineServer(spec, admin_key=ADMIN_KEY)
    server.start()
    try:
        with pytest.raises(EngineError, match=r"engine did not start: .*exited with code") as failure:
            server.wait_ready()
    finally:
        server.stop()
    return str(failure.value)


def test_the_error_of_an_engine_that_cannot_start_names_the_cause(tmp_path: Path) -> None:
    model_dir = tmp_path / "broken"
    model_dir.mkdir()
    (model_dir / "config.json").write_text("{")
    spec = EngineSpec(str(model_dir), "cpu", "float32", 1, 64, 0, str(tmp_path / "log"), 120, 10)
    assert str(model_dir) in error_of_start(spec)


def test_an_engine_that_would_compute_wrong_tokens_does_not_start(models: Models, tmp_path: Path) -> None:
    """The engine checks the attention backend that SGLang resolved, even if the rules of the config were bypassed."""
    spec = EngineSpec(
        *(str(models.paths["A"]), "cpu", "float32", 2, 64, 0, str(tmp_path / "log"), 120, 10),
        dcp=2,
        sglang={"attention_backend": "torch_native"},
    )
    assert "SGLang resolved the attention backend 'torch_native', which cannot serve" in error_of_start(spec)


def start_server() -> None:
    """Start an engine's server and print the error that stops it."""
    try:
        main.serve({})
    except SystemExit as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()


def start_two_servers() -> None:
    """Start a server without the plugin, then a server with the plugin whose spawned worker lacks it."""
    start_server()
    hooks: Any = importlib.import_module("slime_like_plugins.sglang_hooks")
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    http_server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")

    def launch_server(arguments: Any, *, run_scheduler_process_func: Any, run_detokenizer_process_func: Any) -> None:
        hooks._loaded.clear()
        run_scheduler_process_func()

    hooks.record_loaded("kv_usage")
    server_args.ServerArgs, http_server.launch_server = dict, launch_server
    start_server()


def test_an_engine_without_an_enabled_plugin_stops(tmp_path: Path) -> None:
    """SGLang ignores an entry point that is missing, not allowed, or fails; spawned workers load their own plugins."""
    environment = {**os.environ, engine_environment.SGLANG_PLUGINS: "kv_usage", "SGLANG_PLUGINS": "other"}
    with (tmp_path / "log").open("wb") as log:
        process = ForkedEngine(log, environment, f"{__name__}:start_two_servers")
    process.stdin.close()
    assert process.wait(120 * scale()) == 0, (tmp_path / "log").read_text()
    lines = (tmp_path / "log").read_text().splitlines()
    server, worker = (line for line in lines if line.startswith("slime_like plugin"))
    assert server == worker
    assert server.startswith("slime_like plugin not loaded: kv_usage of SLIME_LIKE_SGLANG")
    assert "run `bash scripts/setup.sh`" in server


def wait_for_end() -> None:
    """Report the start, and wait for the end of stdin."""
    os.write(1, b"started")
    os.read(0, 1)


def test_the_environment_of_a_fork_can_be_read_as_that_of_a_started_process(tmp_path: Path) -> None:
    """End-to-end tests find the processes of a run by a mark in their environment."""
    environment, path = {"SHORT": "1", MARK: "a run"}, tmp_path / "log"
    with path.open("wb") as log:
        process = ForkedEngine(log, environment, f"{__name__}:wait_for_end")
    deadline = Deadline("test", "start of a fork", 60)
    while path.read_bytes() != b"started":
        deadline.remaining(f"the fork: {path.read_text()}")
        time.sleep(0.02)
    variables = Path(f"/proc/{process.pid}/environ").read_text().rstrip("\0").split("\0")
    assert variables == [f"{name}={value}" for name, value in environment.items()]
    assert is_marked(process.pid, "a run")
    process.stdin.close()
    assert process.wait(60 * scale()) == 0
