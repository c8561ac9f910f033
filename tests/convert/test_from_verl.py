"""Conversion of verl jobs: an equivalent recipe or a refusal per key, and a table of every key."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_like.cluster.plan.view import show_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like_compat.verl.check import CLASSES, check_verl
from slime_like_compat.verl.convert import VerlSource, convert_verl
from slime_like_compat.verl.launch import read_verl
from slime_like_compat.verl.mapping import translate_settings
from tests.config.model_folder import write_model
from tests.convert.verl_lines import NEEDED, REWARD, A, R, refusals

ROOT = Path(__file__).parents[2]
VERL_FOLDER = Path(__file__).parent / "verl"
FIXTURE = VERL_FOLDER / "run_small_math.sh"


def main() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("from_verl", ROOT / "scripts" / "from_verl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_a_script_composes_and_plans(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (write_model(models / "small-4b", max_position_embeddings=8192) / "chat_template.jinja").write_text(
        "{{ messages }}"
    )
    rows = [
        {"prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "2"}, "extra_info": {"i": 1}}
    ]
    for name in ("train", "aime-24/test", "gsm8k/test"):
        (models / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows * 30), models / "data" / f"{name}.parquet")
    out = tmp_path / "mine" / "recipe" / "small.yaml"
    options = ["--set", f"MODELS={models}", "--set", "DEVICE=gpu", "--with", "reward.name=dapo", "--out", str(out)]
    line = [sys.executable, "scripts/from_verl.py", str(FIXTURE), "trainer.save_freq=10", *options]
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    cfg = load_config(["--config-dir", str(out.parent.parent), "+recipe=small"], files=False, machine=False)
    assert (cfg.rollout.batch_size, cfg.rollout.n_samples_per_prompt) == (128, 8)
    assert (cfg.loop.global_batch_size, cfg.loop.steps_per_rollout, cfg.loop.num_rollout) == (256, 4, 120)
    assert cfg.optim.warmup_steps == 20, "5 rollouts of 4 optimizer steps"
    assert (cfg.rollout.max_response_len, cfg.rollout.max_context_len, cfg.data.max_prompt_len) == (4096, 5120, 1024)
    assert (cfg.algo.aggregation, value_of(cfg, "eps_clip_c"), value_of(cfg, "kl_loss_type")) == (
        "sequence_mean",
        3.0,
        "low_var_kl",
    )
    assert (cfg.placement.actor_num_gpus_per_node, cfg.rollout.num_engines, cfg.rollout.tp) == (8, 4, 2)
    assert sorted(cfg.evaluation.datasets) == ["aime_24", "gsm8k"]
    assert (cfg.evaluation.interval, cfg.evaluation.temperature, cfg.evaluation.n_samples_per_prompt) == (5, 0.6, 4)
    assert (cfg.reward.name, cfg.reward.overlong_buffer_len) == ("dapo", 512)
    assert (cfg.run.name, cfg.run.save_interval, cfg.model.recompute) == ("small_math", 10, "full")
    assert (cfg.metrics.wandb, cfg.metrics.tensorboard) == (False, True)
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False}
    assert (cfg.data.label_key, cfg.data.on_bad_row) == ("reward_model.ground_truth", "skip")
    assert "+recipe=small --plan" in process.stdout and "given again at the command line" in process.stdout
    plan_text = show_plan(["--config-dir", str(out.parent.parent), "+recipe=small"], "8xNVIDIA H200")
    assert "8 GPUs (NVIDIA H200)" in plan_text
    assert main()([str(FIXTURE), *options]) == 2, "the recipe exists"


def value_of(cfg: Any, name: str) -> Any:
    return getattr(cfg.algo, name)


def test_a_refused_job_ends_in_an_error_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe" / "small.yaml"
    options = [str(FIXTURE), "--set", "MODELS=/m", "--set", "DEVICE=gpu", "--out", str(out)]
    assert (main()([*options, f"{A}.ppo_epochs=2"]), out.exists()) == (2, False)
    table, problem = capsys.readouterr()
    assert "data.reward_fn_key" in problem and f"{A}.ppo_epochs 2" in problem
    assert "refused: changes the job" in table, "the table is printed nevertheless"
    with_fixes = [f"{A}.ppo_epochs=2", "--with", REWARD, "--drop", f"{A}.ppo_epochs"]
    assert (main()([*options, *with_fixes]), out.exists()) == (0, True)


def test_user_code_is_named_in_the_recipe_to_be_ported(tmp_path: Path) -> None:
    out = tmp_path / "recipe" / "own.yaml"
    options = [str(FIXTURE), "--set", "MODELS=/m", "--set", "DEVICE=gpu", "--out", str(out)]
    path = ["custom_reward_function.path=/x/own_rewards.py", "+custom_reward_function.name=score"]
    assert main()([*options, *path]) == 1
    with pytest.raises(ConfigError, match=r"reward\.name.*own_rewards"):
        load_config(["--config-dir", str(tmp_path), "+recipe=own"], files=False, machine=False)


def test_the_jobs_of_a_folder_are_counted_by_class(tmp_path: Path) -> None:
    command = "python3 -m verl.trainer.main_ppo"
    for name, text in {
        "same": f"{command} {NEEDED}",
        "refused": f"{command} {NEEDED} {A}.ppo_epochs=3",
        "value": f"{command} {NEEDED} {A}.optim.lr=$LR",
        "config": f"{command} {NEEDED} {R}.n=1",
        "program": "python3 -m verl.trainer.sft_trainer x.y=1",
        "unread": f"{command} 'open",
    }.items():
        (tmp_path / f"{name}.sh").write_text(text)
    table = check_verl(tmp_path, variables={}, user_overrides=[REWARD]).splitlines()
    assert "| all | 6 |" in table
    assert all(
        any(line.split()[:2] == [name, f"{name}.sh:"] for line in table)
        for name in CLASSES
        if name not in ("same", "code")
    )
    assert any(line.split() == ["same", "same.sh"] for line in table)


def test_unknown_command_outputs_are_listed_in_one_error(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo {NEEDED} {A}.optim.lr=$(lr) {R}.n=$(count gpus) data.train_batch_size=$(size) "
        f"{A}.ppo_epochs=2 trainer.project_name=$(git)"
    )
    conversion = convert_verl(VerlSource(script), tmp_path / "recipe" / "a.yaml", user_overrides=[REWARD])
    assert conversion.code == 2
    for key in (f"{A}.optim.lr", f"{R}.n", "data.train_batch_size"):
        assert (
            f"  {key} ?: needed; is the output of $(" in conversion.problem
            and f"add {key}=VALUE or --drop={key} to the command line" in conversion.problem
        )
    assert f"{A}.ppo_epochs 2: refused" in conversion.problem and "project_name" not in conversion.problem
    overrides = ("data.train_batch_size=64", f"{R}.n=4", f"{A}.optim.lr=1e-6", f"{A}.ppo_epochs=1")
    assert (
        convert_verl(VerlSource(script, overrides), tmp_path / "recipe" / "a.yaml", user_overrides=[REWARD]).code == 0
    )


def test_every_key_of_a_script_has_a_row() -> None:
    _, settings = read_verl(FIXTURE, [], variables={"MODELS": "/m", "DEVICE": "gpu"}, skip=[])
    job = translate_settings(settings, user_overrides=[REWARD])
    assert sorted(row.flag for row in job.rows if row.file_line) == sorted(setting.name for setting in settings)
    assert all(row.keys or row.note for row in job.rows)
    assert refusals(job.rows) == ""


def test_a_variable_that_decides_a_branch_is_required() -> None:
    with pytest.raises(ConfigError, match=r"run_small_math\.sh:\d+:.*--set DEVICE=VALUE may decide"):
        read_verl(FIXTURE, [], variables={"MODELS": "/m"}, skip=[])


PROGRAMS = {
    "python3 -m verl.trainer.main_ppo trainer.nnodes=2": "2",
    "python3 path/to/verl/trainer/main_ppo.py trainer.nnodes=3": "3",
    "ray job submit -- python3 -m verl.trainer.main_ppo ++trainer.nnodes=4": "4",
    "python3 -m verl.trainer.main_ppo --config-name=mine trainer.nnodes=6": "6",
}


@pytest.mark.parametrize(("line", "nodes"), PROGRAMS.items(), ids=list(PROGRAMS))
def test_programs_and_config_files_are_read(line: str, nodes: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 5, save_freq: 7, lr: 1e-6}\n"
    )
    (tmp_path / "run.sh").write_text(line)
    _, settings = read_verl(tmp_path / "run.sh", ["trainer.test_freq=1"], variables={}, skip=[])
    assert [setting.text for setting in settings if setting.key == "trainer.nnodes"][-1] == nodes
    assert settings[-1].name == "trainer.test_freq"
    _, settings = read_verl(tmp_path / "mine.yaml", ["+trainer.nnodes=9"], variables={}, skip=[])
    assert [(setting.key, setting.value) for setting in settings] == [
        ("trainer.nnodes", 5),
        ("trainer.save_freq", 7),
        ("trainer.lr", 1e-6),
        ("trainer.nnodes", 9),
    ]


MAIN = "python3 -m verl.trainer.main_ppo"


@pytest.mark.parametrize(
    "script",
    [
        f"{MAIN} -cp settings -cn mine",
        f"{MAIN} --config-dir=settings --config-name mine.yaml",
        f'{MAIN} --config-path="$(pwd)/jobs/settings" --config-name=mine',
        f"{MAIN} --config-path=/data/jobs/settings --config-name=mine",
    ],
)
def test_the_settings_are_found_although_their_folder_is_unknown(script: str, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "settings").mkdir(parents=True)
    (tmp_path / "jobs" / "settings" / "mine.yaml").write_text("trainer: {nnodes: 5}\n")
    (tmp_path / "jobs" / "run.sh").write_text(script)
    launch, settings = read_verl(tmp_path / "jobs" / "run.sh", [], variables={}, skip=[])
    assert [setting.text for setting in settings] == ["5"]
    assert "mine.yaml" in launch.notes[-1]


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer.yaml"])
@pytest.mark.parametrize("folder", ["./config", "$VERL/verl/trainer/config", "/verl/verl/trainer/config/"])
def test_a_name_of_verls_own_settings_needs_no_file(name: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{MAIN} --config-path={folder} --config-name={name}")
    _, settings = read_verl(tmp_path / "run.sh", [], variables={}, skip=[])
    assert [setting.name for setting in settings] == ["model_engine"] * name.startswith("ppo_megatron")


def test_an_own_file_with_the_name_of_verls_is_read(tmp_path: Path) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text("trainer: {nnodes: 5}\n")
    (tmp_path / "run.sh").write_text(f"{MAIN} --config-path={tmp_path} trainer.save_freq=1")
    _, settings = read_verl(tmp_path / "run.sh", [], variables={}, skip=[])
    assert [setting.key for setting in settings] == ["trainer.nnodes", "trainer.save_freq"]


REFUSED_PROGRAMS = {
    "torchrun -m verl.trainer.sft_trainer data.x=1": "algo=sft",
    "python3 -m verl.experimental.fully_async_policy.fully_async_main": "by hand",
    "python3 -m verl.trainer.main_ppo --config-name=other": "--config FILE",
    "python3 -m verl.trainer.main_ppo --config-name": "run.sh:1: --config-name has no value",
    "python3 -m verl.trainer.main_ppo --config-name=$NAME": r"run.sh:1: --config-name: NAME .*--set NAME=VALUE, or .*--config FILE",
    "python3 -m verl.trainer.main_ppo -cp $DIR -cn a": r"run.sh:1: DIR .*--set DIR=VALUE, or give a.yaml with --config FILE",
    "python3 -m verl.trainer.main_ppo --config-path=/data/ppo": r"reads its settings from /data/ppo/ppo_trainer.yaml",
    "python3 -m verl.trainer.main_ppo --multirun": "not a setting of verl",
    "python3 train.py": "starts no verl.trainer.main_ppo",
}


@pytest.mark.parametrize(("line", "word"), REFUSED_PROGRAMS.items(), ids=list(REFUSED_PROGRAMS))
def test_other_programs_are_refused(line: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(line)
    with pytest.raises(ConfigError, match=word):
        read_verl(tmp_path / "run.sh", [], variables={}, skip=[])
