"""SGLang's arguments and this project's hooks on a phantom GPU: as far as an engine starts without the packages of the GPU lock file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slime_like.phantom.device import PhantomGpu
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.slow

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
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("engine") / "model"
    Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    environment = PhantomGpu(num_devices=2).environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(KERNELS), os.environ.get("PYTHONPATH"))))
    (result,) = run_ranks("tests.phantom.engine_arguments:resolve", 1, folder, VARIANTS, environment=environment)
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
