"""FlowMLA and remote experts in servers started by SGLang's command line, as in examples/flow_mla_server.py."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.remote_experts import worker
from examples.flow_mla_server import CPU_ENVIRONMENT, ask, server_arguments
from slime_like.quickstart.model import MOE, write_model
from slime_like.rollout.engine.server import derived_ports
from slime_like.util.ports import PortLease
from tests.engine.conftest import Models
from tests.engine.forked_engines import ForkedEngine

pytestmark = pytest.mark.engine
ARGUMENTS = "FLOW_MLA_TEST_ARGUMENTS"


def serve() -> None:
    """Run SGLang's command line in a forked process."""
    sys.argv = ["launch_server", *json.loads(os.environ[ARGUMENTS])]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def respond(flags: Callable[[int], list[str]], prompt: list[int], folder: Path) -> tuple[list[int], str]:
    """Start a server with the ``flags`` of a port, send it ``prompt`` and stop it. Return the response and the log."""
    log = folder / "log"
    with PortLease("127.0.0.1", derived_ports(2)) as port, log.open("wb") as file:
        arguments = [*flags(port), "--max-total-tokens", "512"]
        environment = os.environ | CPU_ENVIRONMENT | {ARGUMENTS: json.dumps(arguments), "TMPDIR": str(folder)}
        server = ForkedEngine(file, environment, f"{__name__}:serve")
        try:
            response = ask(port, prompt, lambda: server.poll() is None)
        except BaseException as error:
            error.add_note(f"end of the log:\n{log.read_text()[-6000:]}")
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)
    return response, log.read_text()


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers generates."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_server_that_sglang_starts_shards_weights_and_returns_the_models_tokens(
    models: Models, tmp_path: Path
) -> None:
    prompt = [5, 6, 7]
    response, log = respond(lambda port: server_arguments(str(models.paths["A"]), "cpu", port), prompt, tmp_path)
    assert response == greedy(models.hf["A"], prompt), log[-3000:]
    assert log.count("FlowMLA shards o_proj of 4 layers over 2 ranks (p2p)") == 2


def test_a_server_that_sglang_starts_has_half_of_its_experts_in_a_running_worker(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "model", [5, 6, 7]
    write_model(folder, MOE)
    flags = ["--model-path", str(folder), "--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32"]
    flags += ["--disable-overlap-schedule", "--remote-experts-count", "4", "--remote-experts-transport", "socket"]
    with worker(tmp_path, slowdown=1.0, name="by_hand") as (address, key_file):
        flags += ["--remote-experts-workers", address, "--remote-experts-key-file", key_file]
        response, log = respond(lambda port: [*flags, "--port", str(port)], prompt, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert response == greedy(model, prompt), log[-3000:]
    assert log.count("slime_like remote experts: ") == 1, log[-3000:]
