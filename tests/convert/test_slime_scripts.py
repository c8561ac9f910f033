"""Conversion of launch scripts of slime: each gives an equivalent recipe or, with the reason, no recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like_compat.conversion import CODE, NONE, SAME
from slime_like_compat.slime.check import check_folder
from slime_like_compat.slime.job import convert_script
from slime_like_compat.verl.check import check_verl
from tests.convert.slime_lines import NEEDED

FOLDER = Path(__file__).parent / "slime"
KINDS = {
    "run-sft.sh": (SAME, {"--num-epoch": "mapped", "--rollout-function-path": "always", "train_async.py": "always"}),
    "run-agent.sh": (
        CODE,
        {"--custom-generate-function-path": "code", "--custom-rm-path": "code", "--rm-type": "dropped"},
    ),
    "run-moe-8nodes.sh": (
        SAME,
        {"--sglang-dp-size": "mapped", "--ref-load": "mapped", "--moe-grouped-gemm": "mapped"},
    ),
    "run-fp8.sh": (NONE, {"--hf-checkpoint": "refused", "--fp8-format": "refused"}),
    "run-fault-tolerance.sh": (SAME, {"--use-fault-tolerance": "mapped", "--update-weight-mode": "dropped"}),
    "run-fully-async.sh": (NONE, {"--rollout-function-path": "refused", "--custom-tis-function-path": "code"}),
    "run-own-loss.sh": (NONE, {"--custom-loss-function-path": "code", "--my-own-flag": "unknown"}),
}
OUTCOMES: dict[str, dict[str, Any]] = {
    "run-sft.sh": {
        "algo.name": "sft",
        "loop.num_epoch": 3,
        "loop.steps_per_rollout": 2,
        "rollout.n_samples_per_prompt": 1,
        "data.conversation": "whole",
        "run.mode": "train_only",
        "loop.max_staleness": 0,
    },
    "run-agent.sh": {
        "rollout.generate": "my_search_agent.generate:generate",
        "reward.name": "my_search_agent.reward:score",
        "evaluation.datasets": {"aime": "/data/heldout.jsonl"},
        "evaluation.max_response_len": 16384,
        "rollout.num_engines": 8,
        "loop.steps_per_rollout": 4,
    },
    "run-moe-8nodes.sh": {
        "rollout.dp_attention": 4,
        "rollout.sglang": {"ep_size": 16},
        "rollout.num_engines": 4,
        "model.megatron_checkpoint": "/m/Moe-30B-tuned_torch_dist",
        "model.megatron": {"moe_grouped_gemm": True, "moe_aux_loss_coeff": 0, "moe_token_dispatcher_type": "alltoall"},
        "placement.ray_address": "auto",
        "rollout.filters": ["nonzero_std"],
    },
    "run-fault-tolerance.sh": {
        "health.on_dead_engine": "restart",
        "loop.max_staleness": 1,
        "placement.mode": "split",
        "rollout.num_engines": 2,
        "model.hf_checkpoint": "/m/Model-4B",
        "run.resume": "auto",
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_scripts_become_an_equivalent_recipe_or_none(name: str, tmp_path: Path) -> None:
    code, verdicts = KINDS[name]
    out = tmp_path / "recipe" / "a.yaml"
    conversion = convert_script(FOLDER / name, out)
    assert conversion.code == code, conversion.problem or conversion.report
    assert {flag: next(r.verdict for r in conversion.rows if r.flag == flag) for flag in verdicts} == verdicts
    assert out.exists() == (code != NONE)
    if code == NONE:
        drops = conversion.problem.rpartition("add: ")[2].split()
        refused_flags = {flag for flag, verdict in verdicts.items() if verdict == "refused"}
        assert {f"--drop={flag}" for flag in refused_flags - {"--hf-checkpoint"}} <= {*drops}
        assert "--drop=--hf-checkpoint" not in drops, "a job needs a model"
        assert ("without the others" in conversion.problem) == ("--hf-checkpoint" in refused_flags)
        return
    command = ["--config-dir", str(tmp_path), "+recipe=a"]
    cfg = load_config(command, files=False, machine=False, code=False)
    for key, value in OUTCOMES[name].items():
        group, _, field = key.partition(".")
        assert getattr(getattr(cfg, group), field) == value, key
    if code == CODE:
        with pytest.raises(ConfigError, match="cannot import 'my_search_agent"):
            load_config(command, files=False)


def test_a_missing_model_file_is_replaced_by_config_json(tmp_path: Path) -> None:
    conversion = convert_script(FOLDER / "run-agent.sh", tmp_path / "recipe" / "a.yaml")
    assert (
        "models/of-a-model-that-is-not-here.sh" in conversion.report
        and "as config.json of --hf-checkpoint does" in conversion.report
    )
    with_file = convert_script(FOLDER / "run-sft.sh", tmp_path / "recipe" / "b.yaml").report
    assert f"{FOLDER / 'models' / 'dense-4B.sh'} was read" in with_file and "--num-layers 36" in with_file


def test_a_refused_flag_may_be_dropped_by_name(tmp_path: Path) -> None:
    drop = ["--rollout-function-path"]
    conversion = convert_script(FOLDER / "run-fully-async.sh", tmp_path / "recipe" / "a.yaml", drop=drop)
    assert conversion.code == CODE
    with pytest.raises(ConfigError, match=r"--drop --lr-x: the script does not give it: remove"):
        convert_script(FOLDER / "run-fully-async.sh", tmp_path / "recipe" / "b.yaml", drop=[*drop, "--lr-x"])


OWN_CODE = {
    "--loss-type custom_loss --custom-loss-function-path": ("algo.loss", "slime_loss", "Reinforce", "loss(config)"),
    "--custom-advantage-function-path": (
        "algo.token_advantage",
        "slime_advantages",
        "ConstantAdvantage",
        "advantage(config)",
    ),
    "--use-tis --custom-tis-function-path": (
        "algo.off_policy",
        "slime_tis",
        "halved",
        "correction(config, old_logprobs",
    ),
}


@pytest.mark.parametrize("flag", OWN_CODE)
def test_own_functions_of_an_algorithm_are_in_the_recipe_until_they_are_ported(flag: str, tmp_path: Path) -> None:
    key, before, after, call = OWN_CODE[flag]
    script, command = tmp_path / "run.sh", ["--config-dir", str(tmp_path), "+recipe=a", "placement.device=cpu"]
    for module, words in (
        (f"nowhere.{before}", ["cannot import 'nowhere'"]),
        (f"tests.config.own_algorithm.{before}", [f"cannot be called as {call}", "own_algorithm.py:", "extending.md"]),
    ):
        script.write_text(f"python3 train.py --colocate {NEEDED} {flag} {module}")
        conversion = convert_script(script, tmp_path / "recipe" / "a.yaml", force=True)
        assert conversion.code == CODE, conversion.problem
        path = module.replace(f".{before}", f":{before}")
        assert f"{key.partition('.')[2]}: {path} #" in (tmp_path / "recipe" / "a.yaml").read_text()
        with pytest.raises(ConfigError) as error_info:
            load_config(command, files=False)
        assert all(word in str(error_info.value) for word in [f"{key}='{path}'", *words]), error_info.value
        assert "\n" not in str(error_info.value)
    ported = load_config([*command, f"{key}=tests.config.own_algorithm:{after}"], files=False)
    assert getattr(ported.algo, key.partition(".")[2]).endswith(after)


def test_dropout_that_slime_would_train_with_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {NEEDED.replace('--hidden-dropout 0.0', '')}")
    out = tmp_path / "recipe" / "a.yaml"
    conversion = convert_script(script, out)
    assert (conversion.code, [row.flag for row in conversion.rows if row.verdict == "refused"]) == (
        NONE,
        ["--hidden-dropout"],
    )
    assert convert_script(script, out, drop=["--hidden-dropout"]).code == SAME


def test_unknown_environment_variables_of_a_job_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    env = '{\\"env_vars\\": {\\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\\": \\"1\\", \\"NVLS\\": \\"$(nvidia-smi)\\"}}'
    script.write_text(f'E="{env}"\nray job submit --runtime-env-json="$E" -- python3 train.py {NEEDED}')
    conversion = convert_script(script, tmp_path / "recipe" / "a.yaml")
    assert conversion.code == NONE
    assert "OPEN_TRAINING_INT4_FAKE_QAT_FLAG 1: refused" in conversion.problem


def test_a_folder_of_scripts_is_counted_by_class(tmp_path: Path) -> None:
    table = check_folder(FOLDER)
    assert "| a recipe of the same job | 3 |" in table
    assert "| a recipe of the same job, once the functions that it names are ported | 1 |" in table
    assert "| no recipe: flags without a counterpart, each named (--drop) | 3 |" in table
    assert "| no recipe: values from the environment are needed (--set) | 1 |" in table
    assert "refused run-fully-async.sh: --rollout-function-path" in table
    (tmp_path / "launch.py").write_text("import miles.utils.external_utils.command_utils as U\nU.execute_train('')")
    assert "| a Python launcher: one line prints its command line | 1 |" in check_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"builds its command line when it runs.*python -c"):
        convert_script(tmp_path / "launch.py")
    with pytest.raises(ConfigError, match=r"has no script that starts train.py"):
        check_folder(tmp_path / "empty")


@pytest.mark.parametrize("suffix", [".sh", ".py"])
def test_a_script_that_cannot_be_read_is_one_message(suffix: str, tmp_path: Path) -> None:
    for path, problem in {"missing": "is missing", "folder": "is a folder", "binary": "UTF-8"}.items():
        script = tmp_path / f"{path}{suffix}"
        if path == "folder":
            script.mkdir()
        elif path == "binary":
            script.write_bytes(b"python train.py \xff U.execute_train(")
        with pytest.raises(ConfigError, match=rf"{script} .*{problem}.*; give a launch script"):
            convert_script(script)
    for check in (check_folder(tmp_path), *([check_verl_folder(tmp_path)] if suffix == ".sh" else [])):
        assert "| no recipe: the script cannot be read | 1 |" in check  # folders are skipped


def test_only_a_line_number_is_named_as_a_line(tmp_path: Path) -> None:
    (tmp_path / "deep.sh").write_text(f"{400 * 'if a; then\n'}python train.py\n{400 * 'fi\n'}")
    (tmp_path / "open.sh").write_text("python train.py\nif a; then\n")
    table = check_folder(tmp_path)
    assert "unread  deep.sh: deep.sh: its blocks and the files that it sources are nested too deeply" in table
    assert "unread  open.sh: line 2: " in table


def check_verl_folder(folder: Path) -> str:
    (folder / "binary.sh").write_bytes(b"python -m verl.trainer.main_ppo \xff")
    return check_verl(folder, variables={}, user_overrides=[])


def test_a_script_with_a_damaged_checkpoint_is_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("junk")
    (tmp_path / "run.sh").write_text(f"python train.py {NEEDED} --load {tmp_path}")
    table = check_folder(tmp_path)
    assert "| no recipe: its settings do not compose to a configuration | 1 |" in table
    assert "latest_checkpointed_iteration.txt says 'junk', which is not an iteration" in table


def test_a_script_without_permission_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.sh").write_text("python train.py")

    def refuse(path: Path, *args: object, **options: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    for table in (check_folder(tmp_path), check_verl(tmp_path, variables={}, user_overrides=[])):
        assert "| no recipe: the script cannot be read | 1 |" in table
        assert "Permission denied" in table
