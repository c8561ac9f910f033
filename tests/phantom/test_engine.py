"""Engines on a phantom GPU with stand-ins for SGLang's kernels: arguments, hooks, and a server that a trainer's rank pushes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slime_like.phantom.device import PhantomGpu
from tests.gdn.test_fla import PREPARED, install
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.slow

GIB = 2**30
KERNELS = Path(__file__).parent / "kernels"  # stand-ins of sglang-kernel and cutlass
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "deterministic": {"deterministic": True},
    "released memory": {"releases_memory": True},
    "sharded cache": {"tp": 2, "dcp": 2},
    "data-parallel attention": {"tp": 2, "dp_attention": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("engine") / "model"
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        architectures=["Qwen3ForCausalLM"],
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process on two phantom GPUs with stand-ins for SGLang's kernels, and torch_memory_saver."""
    packages = PREPARED if (PREPARED / "torch_memory_saver").is_dir() else install(tmp_path_factory.mktemp("packages"))
    saver = tmp_path_factory.mktemp("saver")
    for package in packages.glob("torch_memory_saver*"):
        (saver / package.name).symlink_to(package)
    folders = (str(KERNELS), str(saver), os.environ.get("PYTHONPATH"))
    return PhantomGpu(num_devices=2).environment() | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


@pytest.fixture(scope="module")
def resolved(model: Path, variables: dict[str, str]) -> dict[str, Any]:
    (result,) = run_ranks("tests.phantom.engine_arguments:resolve", 1, model, VARIANTS, environment=variables)
    return result


def test_every_hook_is_in_place(resolved: dict[str, Any]) -> None:
    assert resolved["plugins"] == ["dcp", "kv_admission", "kv_size", "kv_usage", "rollout_sampling", "weight_commit"]


@pytest.mark.parametrize("name", VARIANTS)
def test_sglang_accepts_the_arguments_of_an_engine(name: str, resolved: dict[str, Any]) -> None:
    fields, changes = resolved["fields"][name], VARIANTS[name]
    assert (fields["device"], fields["dtype"]) == ("cuda", changes.get("dtype", "bfloat16"))
    sizes = [fields[field] for field in ("tp_size", "dcp_size", "attn_dp_size")]
    assert sizes == [changes.get(field, 1) for field in ("tp", "dcp", "dp_attention")]
    assert fields["attention_backend"] == (
        "triton" if {"float32", 2} & {changes.get("dtype"), changes.get("dcp")} else "fa3"
    )
    assert fields["enable_memory_saver"] == (name == "released memory")


STATIC = 0.7  # mem_fraction_static
FIRST_FREE = 85.0  # GiB


@pytest.fixture(scope="module")
def served(model: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = variables | {"PHANTOM_GPU_USE": str(tmp_path_factory.mktemp("used"))}
    changes = {"releases_memory": True, "sglang": {"mem_fraction_static": STATIC}}
    target = "tests.phantom.engine_process:run"
    (result,) = run_ranks(target, 1, model, changes, FIRST_FREE, seconds=300, environment=environment)
    return result


@pytest.mark.engine
def test_a_server_captures_decode_graphs_and_generates(served: dict[str, Any]) -> None:
    assert served["lengths"] == [(3, 3, 7)] * 5, "after the start, three pushes, and a release"
    assert "Capture target decode CUDA graph end. bs=[1, 2, 4, 8]" in served["log"]
    assert "resolved prefill.backend='disabled'" in served["log"], "SGLang cannot release its graphs of prefill"


@pytest.mark.engine
@pytest.mark.parametrize("transport", ["tensor", "ipc", "broadcast"])
def test_a_server_takes_weights_by_each_transport(transport: str, served: dict[str, Any]) -> None:
    assert served[transport]["tensors"] == 25
    assert served[transport]["version"] == ["tensor", "ipc", "broadcast"].index(transport) + 1


@pytest.mark.engine
def test_a_server_releases_and_restores_its_memory(served: dict[str, Any]) -> None:
    """The server uses torch_memory_saver, whose driver calls release memory of the phantom GPU."""
    before, no_cache, restored, nothing, all_restored = served["used"]
    cache = served["memory"]["kvcache"] * GIB
    assert before - no_cache == pytest.approx(cache, rel=0.01)
    assert nothing < no_cache < 0.05 * cache
    assert restored == pytest.approx(before, rel=0.01) and all_restored == pytest.approx(before, rel=0.01)
    assert served["last push"] == {"tensors": 25, "version": 4}


@pytest.mark.engine
def test_the_cache_of_a_restarted_server_has_the_size_of_its_first_start(served: dict[str, Any]) -> None:
    assert served["free"] == pytest.approx(80 - 0.5, abs=0.1)
    assert served["memory"]["kvcache"] == pytest.approx(FIRST_FREE * STATIC, abs=0.3)
