"""Start of an engine's server whose process ends at once, and its stop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.rollout.engine.server import EngineServer


class DeadServer(EngineServer):
    """Server whose process has ended before it reads its settings."""

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.exit('no such kernel')"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        process.wait()
        return process


def dead_server(folder: Path) -> DeadServer:
    spec = EngineSpec(
        model_path=str(folder / "model"),
        device="cpu",
        dtype="float32",
        tp=1,
        context_length=512,
        seed=0,
        log_path=str(folder / "engine.log"),
        start_deadline_s=60,
    )
    return DeadServer(spec, admin_key="key")


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    server = dead_server(tmp_path)
    try:
        server.start()
        with pytest.raises(EngineError, match=r"(?s)engine did not start: .* exit.* 1.*no such kernel"):
            server.wait_ready()
    finally:
        server.stop()


def test_a_stopped_server_sends_no_further_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process id of a server that has ended may belong to another process."""
    server = dead_server(tmp_path)
    server.start()
    server.stop()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a signal was sent"))
    server.stop()
    server.kill()
