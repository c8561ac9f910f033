"""The example of own data: its rows are read, and its reward counts digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.own_data import NUM_ROWS, prepare
from slime_like.config.load.loader import load_config
from slime_like.reward.check import load_reward
from tests.reward.scored import group


def test_rows_are_written_before_a_run(tmp_path: Path) -> None:
    cfg = load_config(["+recipe=quickstart", f"data.train={tmp_path / 'new' / 'rows.jsonl'}"], files=False)
    prepare(cfg)
    rows = [json.loads(line) for line in Path(cfg.data.train).read_text().splitlines()]
    assert len(rows) == NUM_ROWS
    assert all(sum(map(int, row["prompt"].rstrip("=").split("+"))) == int(row["label"]) for row in rows)


@pytest.mark.parametrize(
    ("label", "text", "score"),
    [("481", "481", 1.0), ("481", " 471\n", 2 / 3), ("481", "4810", 3 / 4), ("481", "", 0.0), ("", "", 0.0)],
)
def test_every_digit_counts(label: str, text: str, score: float) -> None:
    reward: Any = load_reward("reward.name", "examples/own_data.py:score")
    scored_group = group(text, label=label)
    assert reward(scored_group.prompt, scored_group.samples[0]) == pytest.approx(score)
