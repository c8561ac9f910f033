"""``~key`` on a command line: the settings of recipes are ignored."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import tempfile
from pathlib import Path

import pytest

from slime_like.config.load import recipe_edits
from slime_like.config.load.help import render_help
from slime_like.config.load.loader import load_config, unchecked_config
from slime_like.config.load.paths import config_folder
from slime_like.errors import ConfigError

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


def _write(folder: Path, files: dict[str, str]) -> list[str]:
    """Write recipes, keyed by name, and return the arguments that add their folder."""
    for name, text in files.items():
        path = folder / "recipe" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return ["--config-dir", str(folder)]


def test_a_recipe_in_a_subfolder_is_edited(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults: [quickstart, _self_]\noptim: {lr: 0.25}\n"
    argv = [*_write(tmp_path, {"mine/foo": text}), "+recipe=mine/foo"]
    assert load_config(argv, files=False).optim.lr == 0.25
    assert load_config([*argv, "~optim.lr"], files=False).optim.lr == 1e-6


@pytest.mark.parametrize("value", ["mine/quickstart", "'mine/quickstart'"])
def test_a_recipe_with_the_name_of_a_shipped_one_includes_it(tmp_path: Path, value: str) -> None:
    text = "# @package _global_\ndefaults: [quickstart, _self_]\noptim: {lr: 0.25}\n"
    cfg = load_config([*_write(tmp_path, {"mine/quickstart": text}), f"+recipe={value}", "~optim.lr"], files=False)
    assert (cfg.optim.lr, cfg.rollout.batch_size) == (1e-6, 64)


@pytest.mark.parametrize(
    "included",
    [
        "mine/base",
        "/recipe/mine/base",
        "mine/base@_global_",
        "{mine: base}",
        "{mine: [base]}",
        "{/recipe/mine: base}",
        "{/recipe@_global_: mine/base}",
        "{optional mine: base}",
        "{optional mine: absent}, mine/base",
    ],
)
def test_settings_of_every_form_of_include_are_removed(tmp_path: Path, included: str) -> None:
    files = {
        "outer": f"# @package _global_\ndefaults: [{included}, _self_]\n",
        "mine/base": "# @package _global_\ndefaults: [/recipe/quickstart, _self_]\noptim: {lr: 0.25}\n",
    }
    argv = [*_write(tmp_path, files), "+recipe=outer"]
    assert load_config(argv, files=False).optim.lr == 0.25
    assert load_config([*argv, "~optim.lr"], files=False).optim.lr == 1e-6


@pytest.mark.parametrize(("chosen", "lr"), [("mine/outer", 0.125), ("[mine/outer]", 0.25), ("inner", 0.25)])
def test_includes_are_relative_to_the_folder_that_hydra_uses(tmp_path: Path, chosen: str, lr: float) -> None:
    base = "# @package _global_\ndefaults: [/recipe/quickstart, _self_]\noptim: {{lr: {}, weight_decay: 0.5}}\n"
    files = {
        "mine/outer": "# @package _global_\ndefaults: [base, _self_]\n",
        "inner": "# @package _global_\ndefaults: [mine/outer, _self_]\n",
        "mine/base": base.format(0.25),
        "base": base.format(0.125),
    }
    argv = [*_write(tmp_path, files), f"+recipe={chosen}"]
    assert load_config(argv, files=False).optim.lr == lr
    cfg = load_config([*argv, "~optim.lr"], files=False)
    assert (cfg.optim.lr, cfg.optim.weight_decay) == (1e-6, 0.5)


@pytest.mark.parametrize("header", ["#@package _global_", "#  @package   _global_", "\n  # @package _global_"])
def test_every_header_that_hydra_accepts_is_kept(tmp_path: Path, header: str) -> None:
    text = f"{header}\ndefaults: [quickstart, _self_]\noptim: {{lr: 0.25}}\n"
    cfg = load_config([*_write(tmp_path, {"mine": text}), "+recipe=mine", "~optim.lr"], files=False)
    assert cfg.optim.lr == 1e-6


def test_strings_that_look_like_numbers_stay_strings(tmp_path: Path) -> None:
    text = (
        "# @package _global_\ndefaults: [quickstart, _self_]\noptim: {lr: 0.25}\n"
        "rollout: {sglang: {a: '1e5', b: '12e45', c: 1e5, d: 'é', e: 'null', f: '0x10', g: 'on'}}\n"
    )
    argv = [*_write(tmp_path, {"mine": text}), "+recipe=mine", "~optim.lr"]
    values = {"a": "1e5", "b": "12e45", "c": 1e5, "d": "é", "e": "null", "f": "0x10", "g": "on"}
    assert unchecked_config(argv).rollout.sglang == values


def test_only_edited_recipes_are_copied_and_without_modes(tmp_path: Path) -> None:
    _write(tmp_path, {"mine": "# @package _global_\noptim: {lr: 0.25}\n"})
    (tmp_path / "recipe" / "mine.yaml").chmod(0o444)
    defaults = [{"recipe": ["mine", "quickstart_sft"]}]
    files = recipe_edits.config_files([config_folder(), tmp_path], defaults)
    with recipe_edits.configs_without(config_folder(), files, ["optim.lr"]) as folder:
        paths = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o200 for path in folder.rglob("*")}
    assert set(paths) == {"train.yaml", "recipe", "recipe/mine.yaml", "recipe/quickstart_sft.yaml"}
    assert all(paths.values())


@pytest.mark.parametrize("step", ["mkdir", "write_text"])
@pytest.mark.parametrize("named", [True, False])  # an error of a write names no file
def test_a_full_temporary_folder_is_reported_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, step: str, named: bool
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if named else []))

    monkeypatch.setattr(Path, step, fail)
    message = r"^/\S+ cannot be written \(No space left on device\), and '~optim\.lr' .+set TMPDIR to a folder"
    with pytest.raises(ConfigError, match=message):
        load_config(["+recipe=quickstart", "~optim.lr"], files=False)


def test_a_missing_temporary_folder_is_reported_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    message = rf"^{re.escape(str(tmp_path))}/absent/\S+ cannot be written \(No such file or directory\), and .+ TMPDIR"
    with pytest.raises(ConfigError, match=message):
        load_config(["+recipe=quickstart", "~optim.lr"], files=False)


def test_an_unreadable_include_is_reported_with_its_path(tmp_path: Path) -> None:
    files = {"mine": "# @package _global_\ndefaults: [base, _self_]\n", "base": "a: [\n"}
    argv = [*_write(tmp_path, files), "+recipe=mine", "~optim.lr"]
    place = re.escape(str(tmp_path / "recipe" / "base.yaml"))
    with pytest.raises(ConfigError, match=rf"^{place} cannot be read as YAML \(.+\); correct it"):
        load_config(argv, files=False)
    (tmp_path / "recipe" / "base.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=rf"^{place} cannot be read as UTF-8"):
        load_config(argv, files=False)


def test_messages_quote_the_key_for_shells_that_expand_a_tilde() -> None:
    with pytest.raises(ConfigError, match=r"^'~optim\.beta1' ignores .+: remove '~optim\.beta1', or set"):
        load_config(["+recipe=quickstart", "~optim.beta1"], files=False)
    with pytest.raises(ConfigError, match=r"write '~optim\.lr', which ignores"):
        load_config(["+recipe=quickstart", "~optim.lr=1"], files=False)
    assert "+recipe=quickstart '~optim.lr'  the same run" in render_help()
