"""Unread configuration keys, as ``scripts/dead_keys.py`` finds them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from slime_like.config.schema.known import known_keys

# Loaded by path: the folder tests/scripts has the same name.
SPEC = importlib.util.spec_from_file_location("dead_keys", Path(__file__).parents[2] / "scripts" / "dead_keys.py")
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_the_search_finds_reads_only() -> None:
    source = """
def f(cfg: TrainConfig, settings: OptimConfig):
    p, loop = cfg.parallel, cfg.loop
    self._loss = cfg.algo
    self._settings, n = settings, 3
    print(self._settings.eps)
    return p.tp + settings.lr + cfg.rollout.batch_size + other.seed + self._loss.eps_clip
"""
    keys = script.keys_read(source)
    assert {"parallel.tp", "optim.lr", "optim.eps", "rollout.batch_size", "algo.eps_clip"} <= keys
    assert "run.seed" not in keys


def test_every_key_is_read_outside_config() -> None:
    assert script.dead_keys(script.PACKAGE, known_keys()) == []


def test_a_planted_dead_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.dead_keys(script.PACKAGE, [*known_keys(), "optim.planted"]) == ["optim.planted"]
    (tmp_path / "config").mkdir()
    shutil.copy(script.PACKAGE / "cluster" / "plan" / "planner.py", tmp_path / "plan.py")
    (tmp_path / "config" / "optim.py").write_text("def f(cfg: TrainConfig): return cfg.optim.lr")
    assert script.main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "optim.lr: no code in" in output
    assert "model.dtype" not in output


def test_the_script_finds_no_dead_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    assert "keys are read" in capsys.readouterr().out
