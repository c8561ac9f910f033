"""loop.num_epoch: rollouts counted from the rows of the training data."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError, DataError


def argv_with_rows(argv: list[str], rows: int, folder: Path, spec: str = "") -> list[str]:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n\n' * rows)
    return [*argv, f"data.train={path}{spec}", "rollout.batch_size=4", "loop.num_epoch=3"]


@pytest.mark.parametrize(("rows", "spec", "expected"), [(10, "", 6), (7, "", 3), (10, "@[2:6]", 3)])
def test_rollouts_are_counted_as_slime_does(
    argv: list[str], tmp_path: Path, rows: int, spec: str, expected: int
) -> None:
    cfg = load_config(argv_with_rows(argv, rows, tmp_path, spec))
    assert cfg.loop.num_rollout == expected


def test_rules_use_the_counted_rollouts(argv: list[str], tmp_path: Path) -> None:
    line = [*argv_with_rows(argv, 400, tmp_path), "optim.schedule=linear", "optim.decay_steps=300"]
    assert load_config(line).loop.num_rollout == 300, "the default of 100 rollouts would be too few for 300 steps"
    assert load_config(line, files=False).loop.num_epoch == 3, (
        "not counted without files, and not checked against the default"
    )


def test_uncountable_epochs_are_refused(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the 3 rows .* rollout.batch_size=4: an epoch has no complete rollout"):
        load_config(argv_with_rows(argv, 3, tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        load_config([*argv_with_rows(argv, 1, tmp_path), "data.train=no/such.jsonl"])
    with pytest.raises(ConfigError, match=r"data.source=.* does not read: set loop.num_rollout"):
        load_config([*argv_with_rows(argv, 9, tmp_path), "data.source=slime_like.data.prompts:FileSource"])
    with pytest.raises(
        ConfigError, match=r"loop.num_epoch=3 and loop.num_rollout=9: .*remove loop.num_epoch or loop.num_rollout"
    ):
        load_config([*argv_with_rows(argv, 9, tmp_path), "loop.num_rollout=9"])
