"""loop.num_epoch: rollouts counted from the rows of the training data."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.cluster.jobs.layout import node_layout
from slime_like.cluster.jobs.planning import plan_job
from slime_like.cluster.plan import traced_rank
from slime_like.cluster.plan.compiled_kernels import CompileJob, engine_shape
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.cluster.plan.view import show_plan
from slime_like.cluster.start.prepared import load_prepared
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


def test_a_critics_warmup_is_compared_with_the_counted_rollouts(argv: list[str], tmp_path: Path) -> None:
    line = [
        *argv_with_rows(argv, 400, tmp_path),
        "algo=ppo",
        "critic.warmup_rollouts=150",
        "critic.lr_warmup_steps=160",
    ]
    assert load_config(line, files=False).loop.num_rollout == 100
    assert load_prepared(line).loop.num_rollout == 300
    with pytest.raises(ConfigError, match=r"critic\.warmup_rollouts=150 must be below loop\.num_rollout=75"):
        load_config([*argv_with_rows(argv, 100, tmp_path), *line[-3:]])


def test_plans_use_the_counted_rollouts_or_none(argv: list[str], tmp_path: Path) -> None:
    line = [
        *argv_with_rows(argv, 400, tmp_path),
        "optim.schedule=linear",
        "optim.decay_steps=300",
        "optim.warmup_steps=200",
    ]
    assert "300 rollouts (3 epochs), 300 optimizer steps" in show_plan(line)
    text = show_plan([*line, "algo=ppo", "critic.warmup_rollouts=150", "critic.lr_warmup_steps=160"], "8xH200")
    assert "3 epochs of data.train, whose rows are not counted" in text and "optimizer step" not in text
    assert plan_job(line, [ClusterNode("10.0.0.1", 0, 8, 32 * 2**30)]).lines[1].startswith("starting 1 trainer rank")
    assert node_layout(line, 8).num_nodes == 1


def test_kernels_and_traces_are_planned_without_counting_rows(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [*argv_with_rows(argv, 400, tmp_path), "optim.schedule=linear", "optim.decay_steps=300"]
    assert engine_shape(CompileJob(tuple(line), "8xH100", (9, 0), tmp_path)).num_kv_heads == 4
    monkeypatch.setattr(traced_rank, "traced", lambda plan, spec, stage: {"stage": stage})
    assert traced_rank.traces(line, "8xH100") == [{"stage": 0, "note": ""}]


def test_uncountable_epochs_are_refused(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the 3 rows .* rollout.batch_size=4: an epoch has no complete rollout"):
        load_config(argv_with_rows(argv, 3, tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        load_config([*argv_with_rows(argv, 1, tmp_path), "data.train=no/such.jsonl"])
    with pytest.raises(ConfigError, match=r"data.source=.* does not read: set loop.num_rollout"):
        load_config([*argv_with_rows(argv, 9, tmp_path), "data.source=slime_like.data.prompts:FileSource"])


def test_rollouts_are_set_by_one_key_of_the_command_line(argv: list[str], tmp_path: Path) -> None:
    line = [*argv_with_rows(argv, 9, tmp_path), "loop.num_rollout=9"]
    error = "loop.num_epoch=3 and loop.num_rollout=9: .*set loop.num_epoch=null or remove loop.num_rollout"
    with pytest.raises(ConfigError, match=error):
        load_config(line)
    assert load_config([*line, "loop.num_epoch=null"]).loop.num_rollout == 9


def test_num_rollout_is_not_ignored_if_a_recipe_sets_epochs(argv: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe" / "epochs.yaml"
    recipe.parent.mkdir()
    recipe.write_text("# @package _global_\nloop:\n  num_epoch: 3\n")
    *line, _ = argv_with_rows(argv, 9, tmp_path)
    line += [f"--config-dir={tmp_path}", "+recipe=epochs"]
    assert load_config(line).loop.num_rollout == 6
    with pytest.raises(ConfigError, match=r"loop.num_epoch=3 and loop.num_rollout=9"):
        load_config([*line, "loop.num_rollout=9"])
    assert load_config([*line, "loop.num_rollout=9", "loop.num_epoch=null"]).loop.num_rollout == 9
