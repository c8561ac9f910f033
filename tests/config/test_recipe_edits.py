"""``~key`` on a command line: the settings of recipes are ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slime_like.config.load.loader import load_config
from slime_like.config.load.paths import config_folder

SFT = ["algo=sft", "rollout.n_samples_per_prompt=1", "evaluation.datasets={}"]


def test_a_setting_that_the_algorithm_lacks_can_be_removed() -> None:
    cfg = load_config(["+recipe=quickstart", *SFT, "~algo.kl_loss_coef"], files=False)
    assert cfg.algo.name == "sft" and cfg.rollout.batch_size == 64


def test_the_default_replaces_the_removed_setting_and_the_rest_of_the_recipe_is_unchanged() -> None:
    full, without = (load_config(["+recipe=quickstart", *extra], files=False) for extra in ((), ("~optim.lr",)))
    assert (full.optim.lr, without.optim.lr) == (5e-4, 1e-6)
    assert dataclasses.replace(full.optim, lr=1e-6) == without.optim
    assert dataclasses.replace(full, optim=without.optim) == without


def test_settings_of_included_recipes_are_removed() -> None:
    cfg = load_config(["+recipe=quickstart_async", "~algo.kl_loss_coef", "~evaluation.datasets"], files=False)
    assert (vars(cfg.algo)["kl_loss_coef"], vars(cfg.algo)["use_tis"], cfg.evaluation.datasets) == (0.0, True, {})


def test_settings_of_user_recipes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults: [quickstart, override /algo: sft, _self_]\nalgo: {eps_clip: 0.1}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    removed = ["~algo.eps_clip", "~algo.kl_loss_coef"]
    cfg = load_config(["--config-dir", str(tmp_path), "+recipe=mine", *SFT[1:], *removed], files=False)
    assert cfg.algo.name == "sft"
    assert (tmp_path / "recipe" / "mine.yaml").read_text() == text


def test_a_key_on_the_command_line_is_set_although_the_recipes_is_removed() -> None:
    cfg = load_config(["+recipe=quickstart", "~optim.lr", "optim.lr=0.5"], files=False)
    assert cfg.optim.lr == 0.5


def test_the_shipped_recipes_are_unchanged() -> None:
    before = {path: path.read_bytes() for path in config_folder().rglob("*.yaml")}
    load_config(["+recipe=quickstart", "~optim.lr"], files=False)
    assert {path: path.read_bytes() for path in config_folder().rglob("*.yaml")} == before
