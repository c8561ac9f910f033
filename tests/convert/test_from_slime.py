"""A launch script of slime becomes a recipe that composes and plans; its table leaves no flag out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.machine import Machine
from slime_like.cluster.plan import make_plan
from slime_like.cluster.plan_view import show_plan
from slime_like.config.files import check_files
from slime_like.config.flag_defaults import DEFAULTS
from slime_like.config.known import known_keys
from slime_like.config.load import load_config
from slime_like.convert.flag_mapping import Mapped, Row, map_arguments
from slime_like.convert.launch_script import read_launch
from slime_like.convert.recipe_file import write_recipe
from slime_like.errors import ConfigError
from tests.config.model_folder import write_model

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
NEEDED = "--hf-checkpoint m --prompt-data d.jsonl --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4"


def mapped(folder: Path, line: str, *, asynchronous: bool = False, drop: Sequence[str] = ()) -> Mapped:
    script = folder / "run.sh"
    script.write_text(f"python3 train.py {NEEDED} \\\n {line}")
    return map_arguments(read_launch(script, given={}).arguments, run_name="a", asynchronous=asynchronous, drop=drop)


def row(found: Mapped, flag: str) -> Row:
    return next(row for row in found.rows if row.flag == flag)


def test_the_flashqla_run_composes_and_plans(tmp_path: Path) -> None:
    root = tmp_path / "models"
    folder = write_model(root / "Qwen3.5-35B-A3B", **QWEN35_35B)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("dapo-math-17k", "aime-2024"):
        (root / "data" / name).mkdir(parents=True)
        (root / "data" / name / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 30)
    out = tmp_path / "mine" / "recipe" / "flashqla.yaml"
    line = [sys.executable, "scripts/from_slime.py", str(FIXTURE), "--out", str(out), "--set", f"MODEL_ROOT={root}"]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    cfg = load_config(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], files=False, machine=False)
    check_files(cfg)
    layout = make_plan(cfg, NODE).actor.layout
    assert (layout.tp, layout.cp, layout.ep, layout.dp, layout.pp) == (2, 4, 8, 1, 1)
    assert (cfg.rollout.max_response_len, cfg.rollout.tp, cfg.rollout.num_engines) == (8192, 8, 1)
    assert (cfg.model.gdn.backend, cfg.model.recompute, cfg.optim.cpu_offload) == ("flashqla", "full", True)
    assert cfg.data.train.endswith("dapo-math-17k/dapo-math-17k.jsonl")
    assert cfg.reward.name == "deepscaler"
    assert cfg.algo.aggregation == "sequence_mean", "slime's default, written out"
    assert cfg.evaluation.temperature == 1.0, "slime samples held-out prompts as it samples others"
    for text in (
        "--use-dynamic-batch-size",
        "--calculate-per-token-loss off",
        "+recipe=flashqla --plan",
    ):
        assert text in ran.stdout
    shown = show_plan(["--config-dir", str(out.parent.parent), "+recipe=flashqla"], "8xNVIDIA H200")
    assert "8 GPUs (NVIDIA H200)" in shown and "8 x (tp 2 * pp 1 * cp 4 * dp 1, experts over 8)" in shown
    assert "256 = global_batch_size 256" in shown and "1 x (tp 8 each" in shown
    with pytest.raises(ConfigError, match=r"flashqla\.yaml exists.*--force"):
        write_recipe(read_launch(FIXTURE, given={"MODEL_ROOT": str(root)}), out)
    with pytest.raises(ConfigError, match="folder named recipe"):
        write_recipe(read_launch(FIXTURE, given={"MODEL_ROOT": str(root)}), tmp_path / "a.yaml")


def test_every_flag_of_a_script_has_one_row() -> None:
    launch = read_launch(FIXTURE, given={"MODEL_ROOT": "/models"})
    found = map_arguments(launch.arguments, run_name="a", asynchronous=False)
    flags = [value.text for value in launch.arguments if value.text.startswith("--")]
    rows = [row for row in found.rows if row.where]
    assert sorted(row.flag for row in rows) == sorted(flags)
    assert [row.flag for row in found.rows if row.verdict == "unknown"] == []
    assert row(found, "--moe-layer-freq").given == "?", "computed by the script, and not needed"
    assert all(item.keys or item.note for item in found.rows)
    assert {item.verdict for item in rows if item.flag in ("--swiglu", "--num-layers", "--spec")} == {"dropped"}


def test_a_flag_of_ones_own_is_unknown_and_shown(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"OWN=(--my-own-flag 7)\npython3 train.py {NEEDED} ${{OWN[@]}}")
    launch = read_launch(script, given={})
    found = map_arguments(launch.arguments, run_name="a", asynchronous=False)
    assert [row.flag for row in found.rows if row.verdict == "unknown"] == ["--my-own-flag"]
    assert "--my-own-flag 7" in write_recipe(launch, tmp_path / "recipe" / "own.yaml")


ROWS = {
    "--lr 1e-5 --lr 2e-5": ("--lr", "dropped", "given again at"),
    "--kl-loss-coef 0.1": ("--kl-loss-coef", "dropped", "without --use-kl-loss"),
    "--use-kl-loss --kl-loss-coef 0.1 --ref-load r": ("--ref-load", "mapped", ""),
    "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type k1": (
        "--kl-loss-type",
        "dropped",
        "without --kl-loss-coef above 0",
    ),
    "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl": ("--kl-loss-type", "mapped", ""),
    "--ref-load r": ("--ref-load", "dropped", "no KL"),
    "--rm-type nonesuch": ("--rm-type", "dropped", "no reward of this name"),
    "--rm-type boxed_math": ("--rm-type", "mapped", ""),
    "--tis-clip 3": ("--tis-clip", "dropped", "--use-tis"),
    "--custom-rm-path nowhere.at_all.fn": ("--custom-rm-path", "dropped", "cannot be imported"),
    "--sglang-cuda-graph-bs 1 2": ("--sglang-cuda-graph-bs", "mapped", "sglang"),
    "--sglang-tp-size 2": ("--sglang-tp-size", "dropped", "rollout.tp"),
    "--colocate --sglang-mem-fraction-static 0.8": ("--sglang-mem-fraction-static", "mapped", "--plan"),
    "--update-weight-mode delta": ("--update-weight-mode", "dropped", "sends all weights"),
    "--optimizer adam": ("--optimizer", "always", "AdamW"),
    "--rollout-btach-size 3": ("--rollout-btach-size", "unknown", "'--rollout-batch-size'"),
    "--advantage-estimator gspo --eps-clip 3e-4": ("--eps-clip-high", "default", ""),
    "--actor-num-nodes 2 --actor-num-gpus-per-node 8": ("ray job submit", "mapped", "cluster"),
}


@pytest.mark.parametrize(("line", "expected"), ROWS.items(), ids=list(ROWS))
def test_what_becomes_of_a_flag(line: str, expected: tuple[str, str, str], tmp_path: Path) -> None:
    found = row(mapped(tmp_path, line), expected[0])
    assert (found.verdict, expected[2] in found.note) == (expected[1], True), found


def test_defaults_of_slime_are_kept(tmp_path: Path) -> None:
    cfg = mapped(tmp_path, "--rollout-temperature 0.7 --eval-interval 1 --eval-prompt-data a b.jsonl").config
    assert (cfg.data.input_key, cfg.data.shuffle, cfg.run.seed) == ("input", False, 1234)
    assert (cfg.optim.schedule, cfg.optim.weight_decay, cfg.optim.beta2) == ("linear", 0.01, 0.999)
    assert (cfg.evaluation.temperature, cfg.algo.aggregation) == (0.7, "sequence_mean")
    gspo = mapped(tmp_path, "--advantage-estimator gspo --eps-clip 3e-4").config
    assert (getattr(gspo.algo, "eps_clip_high", 0), gspo.algo.aggregation) == (None, "sequence_mean")
    kinds = [mapped(tmp_path, f"--use-kl-loss {coef}").config.algo for coef in ("", "--kl-loss-coef 0.1")]
    assert [getattr(algo, "kl_loss_type", "") for algo in kinds] == ["k3", "k1"], "slime's where there is a KL"
    assert mapped(tmp_path, "--rollout-num-gpus 1", asynchronous=True).config.loop.max_staleness == 1
    assert {item.key for item in DEFAULTS} - set(known_keys()) <= {"model"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lr 1 2", ["run.sh:2", "'2'", "belongs to no flag"]),
        ("--lr $(cat lr)", ["run.sh:2", "--lr", "no command is run"]),
        ("--global-batch-size 7", ["loop.global_batch_size", "run.sh:2: --global-batch-size 7", "--drop FLAG"]),
    ],
)
def test_what_no_recipe_says_names_the_line(line: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mapped(tmp_path, line)
    assert all(word in str(caught.value) for word in words), caught.value
    flag = line.split(" ")[0]
    assert row(mapped(tmp_path, line, drop=[flag]), flag).note == "by --drop"
