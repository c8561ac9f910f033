"""Conversion of slime launch scripts: the recipe composes and plans, and the table lists every flag."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_files
from slime_like.errors import ConfigError
from slime_like_compat import recipe_file
from slime_like_compat.conversion import NONE, SAME
from slime_like_compat.shell.launch_script import read_launch
from slime_like_compat.slime.job import convert_script
from slime_like_compat.slime.mapping import map_arguments
from tests.config.model_folder import write_model
from tests.convert.slime_lines import NEEDED, row

ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).parent / "slime" / "run-qwen3.5-35B-A3B-flashqla.sh"
NODE = Machine(8, 96, 2048 * 2**30, ("NVIDIA H200",) * 8)
QWEN35_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def test_the_flashqla_run_composes_and_plans(tmp_path: Path) -> None:
    root = tmp_path / "models"
    folder = write_model(root / "Qwen3.5-35B-A3B", **QWEN35_35B)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("dapo-math-17k", "aime-2024"):
        (root / "data" / name).mkdir(parents=True)
        (root / "data" / name / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 30)
    out = tmp_path / "mine" / "recipe" / "flashqla.yaml"
    line = [sys.executable, "scripts/from_slime.py", str(FIXTURE), "--out", str(out), "--set", f"MODEL_ROOT={root}"]
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    cfg = load_config(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], files=False, machine=False)
    check_files(cfg)
    layout = make_plan(cfg, NODE).actor.layout
    assert (layout.tp, layout.cp, layout.ep, layout.dp, layout.pp) == (2, 4, 8, 1, 1)
    assert (cfg.rollout.max_response_len, cfg.rollout.tp, cfg.rollout.num_engines) == (8192, 8, 1)
    assert (cfg.model.gdn.backend, cfg.model.recompute, cfg.optim.cpu_offload) == ("flashqla", "full", True)
    assert cfg.data.train.endswith("dapo-math-17k/dapo-math-17k.jsonl")
    assert cfg.reward.name == "deepscaler"
    assert cfg.algo.aggregation == "sequence_mean", "slime's default is written explicitly"
    assert cfg.evaluation.temperature == 1.0, "slime samples evaluation prompts like training prompts"
    for text in (
        "--use-dynamic-batch-size",
        "--calculate-per-token-loss off",
        "+recipe=flashqla --plan",
    ):
        assert text in process.stdout
    plan_text = show_plan(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], "8xNVIDIA H200")
    assert "8 GPUs (NVIDIA H200)" in plan_text and "8 x (tp 2 * pp 1 * cp 4 * dp 1, experts over 8)" in plan_text
    assert "256 = global_batch_size 256" in plan_text and "1 x (tp 8 each" in plan_text
    with pytest.raises(ConfigError, match=r"flashqla\.yaml exists.*--force"):
        convert_script(FIXTURE, out, variables={"MODEL_ROOT": str(root)})
    with pytest.raises(ConfigError, match="folder named recipe"):
        convert_script(FIXTURE, tmp_path / "a.yaml", variables={"MODEL_ROOT": str(root)})
    with pytest.raises(ConfigError, match=r"--out \S+a\.yaml cannot be written \(Not a directory\): name another file"):
        convert_script(FIXTURE, out / "recipe" / "a.yaml", variables={"MODEL_ROOT": str(root)})


def test_every_flag_of_a_script_has_one_row() -> None:
    launch = read_launch(FIXTURE, variables={"MODEL_ROOT": "/models"})
    job = map_arguments(launch.arguments, run_name="a", asynchronous=False)
    flags = [value.text for value in launch.arguments if value.text.startswith("--")]
    rows = [row for row in job.rows if row.file_line]
    assert sorted(row.flag for row in rows) == sorted(flags)
    assert [row.flag for row in job.rows if row.verdict == "unknown"] == []
    assert row(job, "--moe-layer-freq").value_text == "?", "computed by the script and not needed"
    assert all(item.keys or item.note for item in job.rows)
    assert {item.verdict for item in rows if item.flag in ("--swiglu", "--num-layers", "--spec")} == {"dropped"}


def test_a_user_flag_is_reported_as_unknown(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"OWN=(--my-own-flag 7)\npython3 train.py {NEEDED} ${{OWN[@]}}")
    out = tmp_path / "recipe" / "own.yaml"
    conversion = convert_script(script, out)
    assert [row.flag for row in conversion.rows if row.verdict == "unknown"] == ["--my-own-flag"]
    assert (conversion.code, out.exists()) == (NONE, False)
    assert "--my-own-flag 7" in conversion.report and "--drop=--my-own-flag" in conversion.problem
    assert convert_script(script, out, drop=["--my-own-flag"]).code == SAME
    assert out.exists()


RECIPE = ("# @package _global_", "data: {train: d.jsonl}", "model: {hf_checkpoint: other}", "reward: {name: math}")


def test_a_recipe_that_does_not_compose_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED}")
    out = tmp_path / "recipe" / "a.yaml"
    out.parent.mkdir()
    out.write_text("a recipe of before")
    with monkeypatch.context() as patch:
        patch.setattr(recipe_file, "recipe_text", lambda *_: "\n".join(RECIPE))
        with pytest.raises(ConfigError, match="does not compose"):
            convert_script(script, out, force=True)
    assert out.read_text() == "a recipe of before"
