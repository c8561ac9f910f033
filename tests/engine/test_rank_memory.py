"""Memory of a rank on a CPU: the environment variable, and the weights that SGLang's free memory excludes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_like.config.schema.rank_memory import VARIABLE
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import ConfigError
from slime_like.rollout.engine.environment import child_environment
from slime_like_plugins.sglang_cpu import memory

SPEC = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "much", "\u0661", pytest.param("9" * 5000, id="too long")])
def test_the_memory_of_a_rank_is_a_number_of_bytes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"^{VARIABLE}={text!r} is not a number of bytes above 0: set it"):
        child_environment(SPEC, "/scratch")
    with pytest.raises(SystemExit, match=f"slime_like plugin 'cpu': {VARIABLE}="):
        memory.install()


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1000")
    assert child_environment(SPEC, "/scratch")[VARIABLE] == "1000"
    with pytest.raises(ConfigError, match=f"{VARIABLE}=1000 has no effect with placement.device=cuda"):
        child_environment(replace(SPEC, device="cuda"), "/scratch")


def test_the_weights_of_a_rank_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is the rank's memory less its weights, times the number of NUMA nodes, by which SGLang divides it."""
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0", "1"])
    monkeypatch.setattr(memory, "_models", [])
    monkeypatch.setenv(VARIABLE, "1000")
    assert memory.free_bytes() == 2 * 1000
    model, tied = torch.nn.Linear(5, 4, bias=False), torch.nn.Module()
    tied.register_parameter("weight", model.get_parameter("weight"))
    tied.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    vars(tied)["absorbed"] = torch.zeros(7)
    model.add_module("tied", tied)
    memory.record_model(model)
    assert memory.free_bytes() == 2 * (1000 - 4 * 20 - 8 * 3 - 4 * 7)
    monkeypatch.setenv(VARIABLE, "50")
    assert memory.free_bytes() == 0
