"""Faster imports: garbage collector and metadata lookup are restored, and package names are unchanged."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.util.deadline import scale
from slime_like.util.imports import Distributions, heavy_imports, select_entry_points
from tests.conftest import read_distributions


def test_collector_and_metadata_are_restored() -> None:
    original_lookup, original_reader = importlib.metadata.packages_distributions, importlib.metadata.entry_points
    with pytest.raises(KeyError), heavy_imports():
        assert not gc.isenabled()
        assert importlib.metadata.entry_points is select_entry_points
        raise KeyError("an import that fails")
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is original_lookup
    assert importlib.metadata.entry_points is original_reader


def test_entry_points_are_read_again_if_the_path_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of a group are those that the original returns, inside ``heavy_imports`` too."""
    original = importlib.metadata.entry_points
    with heavy_imports():
        assert importlib.metadata.entry_points(group="console_scripts") == original(group="console_scripts") != ()
    assert not select_entry_points(group="added_group")
    folder = tmp_path / "added_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: added-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[added_group]\nname = added_package:run\n")
    assert not select_entry_points(group="added_group")
    monkeypatch.syspath_prepend(tmp_path)
    (entry_point,) = select_entry_points(group="added_group")
    assert (entry_point.name, entry_point.value) == ("name", "added_package:run")
    monkeypatch.undo()
    assert not select_entry_points(group="added_group")


def test_lookups_equal_the_complete_mapping() -> None:
    mapping, reads = read_distributions(), list[int]()

    def read_config() -> dict[str, list[str]]:
        reads.append(1)
        return dict(mapping)

    distributions = Distributions(read_config)
    for name in ("torch", "transformers", "numpy"):
        assert name in distributions.get(name, [])
    assert not reads, "a name that is its own distribution needs no reading of every package"
    assert distributions.get("yaml", []) == mapping["yaml"] != ["yaml"]
    assert distributions.get("no_such_module", []) == []
    assert len(reads) == 1


@pytest.mark.slow
def test_a_config_is_read_without_importing_model_classes(tmp_path: Path) -> None:
    """The config is read in a new process, because a config class is imported only once per process.

    The file of a model that is not imported is read once, to find the names that it defines.
    """
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_experts": 7}')
    script = f"""
import sys
from slime_like.util.imports import heavy_imports
num_reads = 0
def count_reads(event, arguments):
    global num_reads
    num_reads += event == "open" and str(arguments[0]).endswith("/models/albert/modeling_albert.py")
sys.addaudithook(count_reads)
with heavy_imports():
    from slime_like.train.megatron.families.hf import HFFolder
    config = HFFolder({str(tmp_path)!r}).config()
print(type(config).__name__, config.num_experts, "torch._dynamo" in sys.modules)
with heavy_imports():
    from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM._model_mapping[type(config)].__name__, num_reads)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120 * scale(), check=False
    )
    assert result.stdout.split() == ["Qwen3NextConfig", "7", "False", "Qwen3NextForCausalLM", "1"], result.stderr


def test_the_driver_does_not_import_torch() -> None:
    script = (
        "import sys, slime_like.cluster.start.launch; print(*sys.modules.keys() & {'torch', 'transformers', 'ray'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120 * scale(), check=False
    )
    assert result.stdout == "ray\n", result.stdout + result.stderr
