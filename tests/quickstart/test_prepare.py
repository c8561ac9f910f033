"""Preparation of the quickstart: files it creates, keeps, and refuses to overwrite."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime_like.config.load.loader import load_config, to_yaml
from slime_like.config.schema.algo import GrpoConfig, SftConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.quickstart import prepare as prepare_module
from slime_like.quickstart.prepare import (
    check_folders,
    prepare,
    prepare_gdn,
    prepare_latent,
    prepare_moe,
    prepare_next,
)
from tests.unchanged import unchanged


def config(data: Path, model: Path, *, sft: bool = True) -> TrainConfig:
    base = TrainConfig(algo=SftConfig() if sft else GrpoConfig())
    return replace(
        base,
        data=replace(base.data, train=str(data)),
        model=replace(base.model, hf_checkpoint=str(model)),
    )


@pytest.mark.parametrize("job", [prepare, prepare_gdn, prepare_next, prepare_moe, prepare_latent])
def test_assets_are_made_once_and_load(job: Callable[[TrainConfig], None], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds

    cfg = config(tmp_path / "assets" / "sft.jsonl", tmp_path / "assets" / "model")
    job(cfg)
    weights = tmp_path / "assets" / "model" / "model.safetensors"
    mtime = weights.stat().st_mtime_ns
    job(cfg)
    assert weights.stat().st_mtime_ns == mtime
    tokenizer = AutoTokenizer.from_pretrained(weights.parent)
    assert tokenizer.decode(tokenizer("475+6=")["input_ids"]) == "475+6="
    model = AutoModelForCausalLM.from_pretrained(weights.parent)
    assert 100_000 < model.num_parameters() < 1_000_000
    kinds = getattr(model.config, "layer_types", None)
    assert job not in (prepare_gdn, prepare_next) or kinds == ["linear_attention"] * 3 + ["full_attention"]
    num_experts = getattr(model.config, "num_experts", None) or getattr(model.config, "n_routed_experts", 0)
    assert (job in (prepare_next, prepare_moe, prepare_latent)) == (num_experts == 8)
    weights = dict(model.named_parameters(remove_duplicate=False))
    embedding = next(weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    is_tied = embedding is weights["lm_head.weight"]
    assert is_tied or torch.linalg.vector_norm(embedding, dim=-1).min() > 0, (
        "a token that may be sampled has no embedding"
    )


def test_another_job_replaces_the_model(tmp_path: Path) -> None:
    from transformers import AutoConfig  # takes seconds

    cfg = config(tmp_path / "assets" / "sft.jsonl", tmp_path / "assets" / "model")
    for job, kind in ((prepare, "qwen3"), (prepare_gdn, "qwen3_5_text"), (prepare, "qwen3")):
        job(cfg)
        assert AutoConfig.from_pretrained(tmp_path / "assets" / "model").model_type == kind


def test_a_users_data_is_not_overwritten(tmp_path: Path) -> None:
    user_data = tmp_path / "train.jsonl"
    user_data.write_text("mine")
    with pytest.raises(ConfigError, match=r"data\.train: .*did not write.*run\.prepare=null"):
        prepare(config(user_data, tmp_path / "model"))
    assert user_data.read_text() == "mine"


def write_run(folder: Path, cfg: TrainConfig) -> Path:
    """Write the config and an export of a run without a stamp, and return the path of its weights."""
    (folder / "hf").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    weights = folder / "hf" / "model.safetensors"
    weights.write_text("trained")
    return weights


def recipe_config(folder: Path, recipe: str) -> TrainConfig:
    """Return the config of a default job whose data and warm start are in ``folder``."""
    paths = [f"model.hf_checkpoint={folder}/warm/hf", f"data.train={folder}/assets/train.jsonl"]
    return load_config([f"+recipe={recipe}", *paths], files=False)


@pytest.fixture
def no_assets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no datasets and no model."""
    monkeypatch.setattr(prepare_module, "_write_assets", lambda folder, job: None)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("no_assets")
def test_a_warm_start_of_the_user_is_used_and_not_repeated(tmp_path: Path) -> None:
    weights = write_run(tmp_path / "warm", recipe_config(tmp_path, "quickstart_sft"))
    prepare(recipe_config(tmp_path, "quickstart"))
    assert weights.read_text() == "trained"
    assert not (tmp_path / "warm" / prepare_module.STAMP).exists()


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_gdn_sft"])
def test_another_run_is_not_taken_for_the_warm_start(recipe: str, tmp_path: Path) -> None:
    weights = write_run(tmp_path / "warm", recipe_config(tmp_path, recipe))
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint: .*did not write.*run\.prepare=null"):
        prepare(recipe_config(tmp_path, "quickstart"))
    assert weights.read_text() == "trained"


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_gdn"])
def test_a_warm_start_of_the_user_is_to_be_finished(recipe: str, tmp_path: Path) -> None:
    write_run(tmp_path / "warm", recipe_config(tmp_path, f"{recipe}_sft"))
    shutil.rmtree(tmp_path / "warm" / "hf")
    words = rf"model\.hf_checkpoint: the run in {tmp_path}/warm has not written .* yet: finish it.*\(such as \+recipe={recipe}_sft\)"
    with unchanged(tmp_path), pytest.raises(ConfigError, match=words):
        check_folders(recipe_config(tmp_path, recipe))


def test_the_warm_start_of_the_user_is_recognized_without_importing_its_functions(tmp_path: Path) -> None:
    cfg = recipe_config(tmp_path, "quickstart_sft")
    text = to_yaml(cfg).replace("loss: sft", "loss: missing.py:Loss")
    assert "missing.py:Loss" in text
    write_run(tmp_path / "warm", cfg)
    (tmp_path / "warm" / "config.yaml").write_text(text)
    check_folders(recipe_config(tmp_path, "quickstart"))


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "cannot be read as YAML"), ("run: {}", "cannot be used: .* has no algo.name")]
)
def test_an_unreadable_config_of_a_warm_start_is_named(text: str, problem: str, tmp_path: Path) -> None:
    write_run(tmp_path / "warm", recipe_config(tmp_path, "quickstart_sft"))
    (tmp_path / "warm" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.hf_checkpoint: .*config\.yaml {problem}.*move the folder away"):
        check_folders(recipe_config(tmp_path, "quickstart"))


@pytest.mark.usefixtures("no_assets")
@pytest.mark.parametrize("files", [None, [["hf"]], "hf"])
def test_an_outdated_warm_start_without_a_list_of_files_is_not_removed(files: object, tmp_path: Path) -> None:
    """Stamps of earlier versions do not list the files of the warm start."""
    stamp = {"model": "another model"} | ({} if files is None else {prepare_module.FILES: files})
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / prepare_module.STAMP).write_text(json.dumps(stamp))
    (tmp_path / "warm" / "mine").write_text("mine")
    words = rf"model\.hf_checkpoint: the warm start in {tmp_path}/warm is out of date.* does not list .*move the folder away"
    with unchanged(tmp_path / "warm"), pytest.raises(ConfigError, match=words):
        prepare(recipe_config(tmp_path, "quickstart"))


@pytest.mark.usefixtures("no_assets")
def test_an_outdated_warm_start_with_a_users_file_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_in_child(what: str, command: list[str], deadline: object) -> int:
        weights.write_text("trained")
        return 0

    cfg, weights = recipe_config(tmp_path, "quickstart"), tmp_path / "warm" / "model.safetensors"
    monkeypatch.setattr(prepare_module, "run_child", run_in_child)
    prepare(cfg)
    weights.write_text("current")
    prepare(cfg)
    assert weights.read_text() == "current"
    (tmp_path / "warm" / "checkpoints").mkdir()
    (user_file := tmp_path / "warm" / "checkpoints" / "mine").write_text("mine")
    prepare(cfg)
    with pytest.raises(ConfigError, match=r"1 file that the quickstart did not write, such as checkpoints/mine;"):
        prepare_gdn(cfg)  # the stamp is of another model
    assert (weights.read_text(), user_file.read_text()) == ("current", "mine")
    user_file.unlink()
    prepare_gdn(cfg)
    assert weights.read_text() == "trained"


def test_a_partially_removed_folder_is_still_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(path: Path) -> None:
        raise KeyboardInterrupt

    (tmp_path / "hf").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / prepare_module.STAMP).write_text('{"of": "another model"}')
    monkeypatch.setattr(prepare_module.shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        prepare_module._empty(tmp_path)
    prepare_module._check_owned("model.hf_checkpoint", tmp_path)
    monkeypatch.undo()
    prepare_module._empty(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [prepare_module.STAMP]
    assert (tmp_path / prepare_module.STAMP).read_text() == prepare_module.UNFINISHED


def test_a_users_model_is_not_removed(tmp_path: Path) -> None:
    user_model = tmp_path / "models" / "hf"
    user_model.mkdir(parents=True)
    (user_model / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint: .*did not write.*run\.prepare=null"):
        prepare(config(tmp_path / "assets" / "train.jsonl", user_model, sft=False))
    assert (user_model / "config.json").read_text() == "mine"
    assert not (tmp_path / "assets").exists()
