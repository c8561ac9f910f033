"""Plans for described machines and several nodes (``--plan-for``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.view import show_plan
from slime_like.errors import CheckpointError, ConfigError
from tests.config.recipe_plans import plan


def test_cores_are_counted_per_node() -> None:
    cluster = ("placement.ray_address=auto", "placement.actor_num_nodes=4", "rollout.num_engines=16")
    described = plan("qwen3_4b_gsm8k")
    four = plan("qwen3_4b_gsm8k", *cluster, machine=described_machine("4x8xH100"))
    assert (
        (described.trainer_threads, described.engine_threads) == (four.trainer_threads, four.engine_threads) == (8, 8)
    )
    assert any("on each of 4 nodes" in decision.reason for decision in four.decisions)


@pytest.mark.parametrize("machine", ["8xH200", "8xNVIDIA H100 80GB HBM3", "2x4xH100"])
def test_another_machine_is_planned_in_an_empty_folder(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["placement.ray_address=auto"] if machine.startswith("2x") else []
    text = show_plan(["+recipe=qwen3_4b_gsm8k", *overrides], machine)
    assert re.search(r"^memory     \d+\.\d GiB of \d+\.\d GiB on each GPU with trainer \+ engine", text, re.MULTILINE)
    assert "sequences of 1,536 tokens" in text and "weights, tokenizer, data and main memory are not checked" in text


def test_a_plan_for_several_nodes_names_the_cluster_that_the_run_joins() -> None:
    for machine, has_nodes in (("8xH100", False), ("2x4xH100", True)):
        advice = plan("qwen3_4b_gsm8k", machine=described_machine(machine)).advice
        assert any("2 nodes" in line and "set placement.ray_address=auto" in line for line in advice) is has_nodes
    joined_plan = plan("qwen3_4b_gsm8k", "placement.ray_address=auto", machine=described_machine("2x4xH100"))
    assert joined_plan.advice == ()


@pytest.mark.parametrize("address", ["placement.ray_address=auto", "placement.ray_address=null"])
def test_an_engine_over_a_part_of_described_nodes_is_refused(address: str) -> None:
    wide = ("rollout.tp=8", "rollout.num_engines=1", address)
    with pytest.raises(ConfigError, match=r"rollout\.tp=8 on 1 node: .* nodes of --plan-for have 6: set rollout\.tp=6"):
        plan("qwen3_4b_gsm8k", *wide, machine=described_machine("2x6xH100"))


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        (("rollout.tp=8", "rollout.engine_num_nodes=4"), r"set rollout\.engine_num_nodes=null$"),
        (("rollout.tp=12",), r"set rollout\.tp=4 or a multiple of it, at most 8$"),
        (("rollout.tp=8", "placement.ray_address=null"), r"set rollout\.tp to at most the number of GPUs of a node$"),
    ],
)
def test_the_fix_for_an_engine_of_too_many_described_nodes_is_named(keys: tuple[str, ...], fix: str) -> None:
    wide = ("rollout.num_engines=1", "placement.ray_address=auto")
    with pytest.raises(ConfigError, match=fix):
        plan("qwen3_4b_gsm8k", *wide, *keys, machine=described_machine("2x4xH100"))


def test_an_engine_over_whole_nodes_is_planned_as_on_one_node() -> None:
    wide = ("rollout.tp=8", "rollout.num_engines=1", "placement.ray_address=auto")
    single_node, two_nodes = (
        plan("qwen3_4b_gsm8k", *wide, machine=described_machine(text)) for text in ("8xH100", "2x4xH100")
    )
    assert (
        two_nodes.memory.tables == single_node.memory.tables
        and two_nodes.roles == single_node.roles
        and single_node.advice == two_nodes.advice == ()
    )
    assert (single_node.engines[0].num_nodes, two_nodes.engines[0].num_nodes) == (1, 2)
    (decision,) = [decision for decision in two_nodes.decisions if decision.key == "rollout.engine_num_nodes"]
    assert (decision.value, decision.reason) == ("2", "rollout.tp=8 and 4 GPUs on each node")


def test_the_largest_machine_that_can_be_described_is_planned() -> None:
    machine = described_machine("9999x999xH100")
    assert machine.num_gpus == 9_999 * 999 and len(machine.gpu_names) == 1


def test_a_model_without_folder_or_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"'models/Unheard-1B' is neither .* Qwen3-4B, "):
        show_plan(["+recipe=qwen3_4b_gsm8k", "model.hf_checkpoint=models/Unheard-1B"], "8xH200")


@pytest.mark.parametrize("text", ["x8", "0xH100", "8xx", "-8xH100", "8x8x8xH100"])
def test_a_malformed_machine_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--plan-for .*: write the number of GPUs"):
        described_machine(text)


@pytest.mark.slow
def test_plan_for_works_from_the_command_line(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    command = [sys.executable, str(repository / "train.py"), "--plan-for", "8xH200", "+recipe=qwen3_4b_gsm8k"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
