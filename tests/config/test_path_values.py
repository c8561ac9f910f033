"""Paths in the config: ``~`` is expanded, and empty paths are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.rules.path_values import PATHS
from slime_like.errors import ConfigError

KEYS = Path(__file__).with_name("keys.txt").read_text().split()


def test_every_path_key_is_listed() -> None:
    words = ("checkpoint", "_from", "dir", "train", "resume", "path", "file", "folder")
    path_keys = {key for key in KEYS if key.rpartition(".")[2].endswith(words)}
    assert (path_keys | {"critic.load"}) - set(PATHS) == {
        "evaluation.before_train",
        "guard.profile",
        "placement.offload_train",
        "run.verify_checkpoint",
    }, "a new path belongs into PATHS"
    assert set(PATHS) <= set(KEYS)


def test_a_home_folder_is_expanded(argv: list[str], monkeypatch: pytest.MonkeyPatch, model: Path, data: Path) -> None:
    home = model.parent
    monkeypatch.setenv("HOME", str(home))
    cfg = load_config(
        [
            f"model.hf_checkpoint=~/{model.name}",
            f"data.train={data}",
            "run.dir=~/runs/${run.name}",
            f"evaluation.datasets.held={data}@[0:1]",
            "run.resume=~",
        ]
    )
    assert cfg.model.hf_checkpoint == str(model)
    assert (cfg.run.dir, cfg.run.resume) == (str(home / "runs" / "run"), str(home))
    assert cfg.evaluation.datasets == {"held": f"{data}@[0:1]"}


def test_two_paths_of_one_reward_are_refused(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, sample):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"reward\.weights has 'mine\.py:score' and './mine\.py:score', .*: remove one"
    ):
        load_config([*argv, r"reward.weights={mine.py\:score: 1, ./mine.py\:score: 2}"], files=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.dir=", "run.dir is empty: give a path"),
        ("model.hf_checkpoint=''", "model.hf_checkpoint is empty"),
        ("evaluation.datasets.held=''", "evaluation.datasets.held is empty"),
        ("run.dir=~no_such_user_here/x", "run.dir='~no_such_user_here/x': Could not determine home directory"),
    ],
)
def test_an_invalid_path_is_named(override: str, words: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([*argv, override], files=False)
