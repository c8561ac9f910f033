"""Engines with the float8 weights of a checkpoint: refused combinations, the arguments of an engine, and its planned memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.assignment import assign
from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.config.load.loader import load_config
from slime_like.config.rules.float8_engines import check_float8_gpus, check_float8_model
from slime_like.config.rules.hf import read_hf_config
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import ConfigError
from slime_like.rollout.engine.environment import SGLANG_PLUGINS, child_environment
from slime_like.rollout.engine.main import MODEL_OVERRIDES, EngineLaunch, server_arguments
from tests.config.model_folder import write_model

RECIPE = "+recipe=deepseek_r1_h20"
DECLARED = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
RULES = {
    "training": (["run.mode=full"], r"with run\.mode=full: a push .* set run\.mode=rollout_only"),
    "a CPU": (["placement.device=cpu"], r"with placement\.device=cpu: SGLang's float8 kernels need GPUs"),
    "float32": (["model.dtype=float32"], r"with model\.dtype=float32"),
    "remote experts": (["rollout.remote_experts.count=4"], r"with rollout\.remote_experts"),
    "another format": (
        ["rollout.flow_mla.enabled=false", "rollout.flow_mla.weights=[o_proj]", "rollout.sglang.quantization=w8a8_fp8"],
        r"with rollout\.sglang\.quantization='w8a8_fp8'",
    ),
    "absorbed weights": (["rollout.flow_mla.weights=[o_proj,kv_b_proj]"], "remove kv_b_proj"),
    "an unknown dtype": (["rollout.weight_dtype=float4"], r"rollout\.weight_dtype='float4'"),
}


def plan_of(*overrides: str, machine: str = "8xH20") -> Plan:
    cfg = load_config([RECIPE, *overrides], files=False, machine=False)
    return make_plan(cfg, described_machine(machine))


@pytest.mark.parametrize("name", RULES)
def test_a_combination_that_an_engine_could_not_serve_is_refused(name: str) -> None:
    overrides, words = RULES[name]
    with pytest.raises(ConfigError, match=words):
        load_config([RECIPE, *overrides], files=False, machine=False)


@pytest.mark.parametrize(
    ("address", "fix"),
    [("null", "remove rollout"), ("auto", r"set placement\.device=cuda if other nodes have GPUs, or remove rollout")],
)
def test_a_machine_without_gpus_is_refused(address: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.weight_dtype=float8: .* none is visible; {fix}\.weight_dtype$"):
        make_plan(
            load_config([RECIPE, f"placement.ray_address={address}"], files=False, machine=False),
            replace(described_machine("1"), num_gpus=0),
        )


@pytest.mark.parametrize("machine", ["8xA100", "8xA800", "8xNVIDIA A100-SXM4-80GB"])
def test_gpus_without_float8_are_refused(machine: str) -> None:
    """In a joined cluster, only the nodes that the run uses have to support float8."""
    words = r"float8 on .*A[18]00.*compute capability 8\.0: .* need 8\.9 or newer .* use such GPUs, or remove rollout"
    with pytest.raises(ConfigError, match=words):
        plan_of(machine=machine)
    cfg = load_config([RECIPE, "placement.ray_address=auto"], files=False, machine=False)
    plan = make_plan(cfg, described_machine("16xH200"))
    name = machine.partition("x")[2]
    nodes = [
        ClusterNode(f"10.0.0.{number}", 8, 64, 2**40, name, str(number)) for number, name in enumerate(("H20", name))
    ]
    assert {node.gpu_name for node in assign(cfg, plan, nodes).gpus} == {"H20"}
    with pytest.raises(ConfigError, match=words):
        assign(cfg, plan, nodes[1:])


def test_a_gpu_that_the_table_lacks_is_refused_by_the_capability_of_the_driver() -> None:
    cfg = load_config([RECIPE], files=False, machine=False)
    check_float8_gpus(cfg, ["NVIDIA RTX 6000 Ada"], (8, 9))
    check_float8_gpus(cfg, ["NVIDIA RTX 6000 Ada"])
    with pytest.raises(ConfigError, match=r"float8 on NVIDIA A10, a GPU of compute capability 8\.6"):
        check_float8_gpus(cfg, ["NVIDIA A10"], (8, 6))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (None, "has no float8 weights"),
        (DECLARED | {"weight_block_size": [64, 128]}, r"one scale per block of \[64, 128\]"),
        (DECLARED | {"weight_block_size": None}, "one scale per matrix"),
    ],
)
def test_a_checkpoint_in_another_format_is_refused(
    tmp_path: Path, declared: Mapping[str, Any] | None, words: str
) -> None:
    cfg = load_config([RECIPE], files=False, machine=False)
    with pytest.raises(ConfigError, match=words):
        check_float8_model(cfg, read_hf_config("model.hf_checkpoint", str(folder(tmp_path, declared))))


def folder(parent: Path, declared: Mapping[str, Any] | None) -> Path:
    """Write a model whose config.json declares a quantisation."""
    path = write_model(parent / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | ({} if declared is None else {"quantization_config": declared}))
    )
    return path


@pytest.mark.parametrize("float8", [False, True])
def test_an_engine_reads_the_checkpoint_as_stored_or_in_its_dtype(tmp_path: Path, float8: bool) -> None:
    path = folder(tmp_path, DECLARED)
    check_float8_model(
        load_config([RECIPE], files=False, machine=False), read_hf_config("model.hf_checkpoint", str(path))
    )
    spec = EngineSpec(str(path), "cuda", "bfloat16", 8, 64, 0, "", 1.0, float8=float8)
    overrides = json.loads(server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1)).get(MODEL_OVERRIDES, "{}"))
    assert ("quantization_config" in overrides) is not float8
    plugins = child_environment(spec, "/tmp/scratch")[SGLANG_PLUGINS].split(",")
    assert ("dequantise" in plugins) is not float8
    assert engine_settings(spec).weights == ("fp8" if float8 else "bfloat16")


def test_float8_weights_fit_one_node_and_bfloat16_weights_do_not() -> None:
    plan = plan_of()
    assert (plan.engines[0].float8, plan.engines[0].num_nodes, plan.num_gpus) == (True, 1, 8)
    assert plan.memory.engine is not None and plan.memory.engine.tokens > 0
    for machine in ("8xH20", "8xH200"):
        with pytest.raises(ConfigError, match=r"GiB"):
            plan_of("rollout.weight_dtype=auto", machine=machine)
