"""Faster imports: what is switched off comes back, and package names are answered as before."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.util.imports import Distributions, heavy_imports


def test_collector_and_metadata_are_as_before_afterwards() -> None:
    before = importlib.metadata.packages_distributions
    with pytest.raises(KeyError), heavy_imports():
        assert not gc.isenabled()
        raise KeyError("an import that fails")
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is before
    gc.unfreeze()


def test_names_are_answered_as_the_whole_mapping_would() -> None:
    whole, reads = importlib.metadata.packages_distributions(), list[int]()

    def read() -> dict[str, list[str]]:
        reads.append(1)
        return dict(whole)

    found = Distributions(read)
    for name in ("torch", "transformers", "numpy"):
        assert name in found.get(name, [])
    assert not reads, "a name that is its own distribution needs no reading of every package"
    assert found.get("yaml", []) == whole["yaml"] != ["yaml"]
    assert found.get("no_such_module", []) == []
    assert len(reads) == 1


@pytest.mark.slow
def test_a_config_is_read_without_model_classes_and_models_are_there_afterwards(tmp_path: Path) -> None:
    """In a process of its own: a config class is imported once."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_experts": 7}')
    script = f"""
import sys
from slime_like.train.megatron.families.hf import HFFolder
config = HFFolder({str(tmp_path)!r}).config()
print(type(config).__name__, config.num_experts, "torch._dynamo" in sys.modules)
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM._model_mapping[type(config)].__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Qwen3NextConfig", "7", "False", "Qwen3NextForCausalLM"], done.stderr
