"""A part of each kind is added from outside the package by the steps of docs/extending.md: one file and one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.schema import names
from slime_like.registry import resolve
from slime_like.reward.check import load_reward
from slime_like.rollout.collect.group_filters import GroupFilters
from slime_like.rollout.generate.generators import open_generator
from tests.config.bad_input import message

OWN_CODE = """
from own_helper import SCORE

def score(prompt, sample):
    return SCORE

def short(group):
    return "long"

async def play(prompt, engine, seeds, context):
    return []

class Source:
    def __init__(self, config, context):
        self.config = config

async def agent(base_url, api_key, prompt, metadata):
    return None
"""
PATHS = ("own_parts.py", "own_parts")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a user's module and its helper."""
    (tmp_path / "own_parts.py").write_text(OWN_CODE)
    (tmp_path / "own_helper.py").write_text("SCORE = 0.25\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("place", PATHS)
def test_parts_of_the_rollout_come_from_a_file_or_a_module_of_the_current_directory(
    place: str, argv: list[str], folder: Path
) -> None:
    lines = {"reward.name": "score", "rollout.generate": "play", "data.source": "Source", "rollout.filters": "short"}
    values = {key: f"[{place}:{name}]" if key.endswith("s") else f"{place}:{name}" for key, name in lines.items()}
    cfg = load_config([*argv, *(f"{key}={value}" for key, value in values.items())], files=False)
    reward: Any = load_reward("reward.name", cfg.reward.name)
    assert reward(None, None) == 0.25
    assert open_generator(cfg.rollout) is not None
    assert resolve("data.source", cfg.data.source, names.DATA_SOURCES)(cfg.data, None).config is cfg.data
    (rule,) = cfg.rollout.filters
    assert resolve("rollout.filters", rule, names.FILTERS)(None) == "long"
    GroupFilters(cfg.rollout)


def test_an_agent_and_a_weighted_reward_come_from_a_file(argv: list[str], folder: Path) -> None:
    agent = ["rollout.generate=openai_agent", "rollout.agent=own_parts.py:agent"]
    cfg = load_config([*argv, *agent, r"reward.weights={own_parts.py\:score: 0.5}"], files=False)
    assert cfg.reward.weights == {"own_parts.py:score": 0.5}


def test_a_file_that_is_not_there_is_named(argv: list[str], folder: Path) -> None:
    text = message(argv, "reward.name=own_part.py:score", files=False)
    assert "reward.name='own_part.py:score'" in text and str(folder) in text


PARTS = {
    "model.family": (names.FAMILIES, "Qwen3"),
    "model.attention": (names.ATTENTIONS, "Attention"),
    "model.gdn.backend": (names.GDN_BACKENDS, "Backend"),
}


@pytest.mark.parametrize("key", PARTS)
def test_a_line_in_its_table_adds_a_part_of_the_model(
    key: str, argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, kind = PARTS[key]
    (folder / "own_model.py").write_text(f"class {kind}:\n    pass\n")
    monkeypatch.syspath_prepend(folder)  # an installed package
    assert "'mine'" in message(argv, f"{key}=mine", files=False)
    monkeypatch.setitem(table, "mine", f"own_model:{kind}")
    load_config([*argv, f"{key}=mine"], files=False)
    assert resolve(key, "mine", table).__name__ == kind


@pytest.mark.parametrize("mode", ["colocated", "split"])
def test_a_line_in_the_table_of_its_placement_adds_a_transport(
    mode: str, argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = names.COLOCATED_TRANSPORTS, names.SPLIT_TRANSPORTS
    if mode == "split":
        table, other = other, table
    line = f"placement.mode={mode} weights.transport=mine"
    assert "'mine' is unknown" in message(argv, line, files=False)
    monkeypatch.setitem(table, "mine", "own_parts:Source")
    assert load_config([*argv, *line.split()], files=False).weights.transport == "mine"
    monkeypatch.delitem(table, "mine")
    monkeypatch.setitem(other, "mine", "own_parts:Source")
    assert f"with placement.mode={mode}" in message(argv, line, files=False)


OWN_ALGORITHM = """
from dataclasses import dataclass
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.base import key

@dataclass(kw_only=True)
class MineConfig(GrpoConfig):
    name: str = key("mine", "Algorithm.")
    loss: str = key("mine", "Token loss.")
    warmth: float = key(0.5, "Weight of something.")
"""
LOAD_OWN_ALGORITHM = """
import sys
from slime_like.config.schema import names
names.ALGORITHMS["mine"] = "own_algo:MineConfig"
names.LOSSES["mine"] = "own_algo:Loss"
from slime_like.config.load.loader import from_yaml, load_config, to_yaml
cfg = load_config([*sys.argv[1:], "algo=mine", "algo.warmth=0.25"], files=False)
assert from_yaml(to_yaml(cfg)) == cfg
print(cfg.algo.name, cfg.algo.loss, cfg.algo.warmth)
"""


def test_a_line_in_the_table_of_algorithms_adds_a_schema(argv: list[str], folder: Path) -> None:
    """In a process of its own: the tables are read when the config is first imported."""
    (folder / "own_algo.py").write_text(OWN_ALGORITHM)
    command = [sys.executable, "-c", LOAD_OWN_ALGORITHM, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["mine", "mine", "0.25"], done.stderr
