"""Where a run starts is settled, and what it would start from looked through, before any process starts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.checkpoint.files import (
    LATEST,
    begin_first,
    iteration_folder,
    latest_iteration,
)
from slime_like.cluster.start.launch import launch
from slime_like.cluster.start.resume import first_rollout
from slime_like.config.load.loader import to_yaml
from slime_like.errors import CheckpointError, ConfigError, RunComplete
from tests.cluster.run_folder import config, used_folder
from tests.unchanged import unchanged


def test_an_empty_folder_starts_afresh(tmp_path: Path) -> None:
    assert first_rollout(config(tmp_path), tmp_path) == 0


def test_auto_goes_on_also_when_the_run_grows(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    assert first_rollout(config(run_dir, num_rollout=20), run_dir) == 4


def test_auto_refuses_another_experiment_and_names_the_way(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"optim\.lr 0\.001 -> 0\.0\): choose another run\.dir .*run\.resume=.*checkpoints"
    ):
        first_rollout(config(run_dir, lr=0.0), run_dir)
    assert first_rollout(config(run_dir, lr=0.0, resume=str(run_dir / "checkpoints")), run_dir) == 4


def test_auto_goes_on_under_another_guard(tmp_path: Path) -> None:
    """What a run that ended for want of memory, or at a deadline of the guard, is told to change."""
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    cfg = replace(cfg, guard=replace(cfg.guard, action="trim", deadline_s=900.0))
    assert first_rollout(cfg, run_dir) == 4


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(RunComplete, match=r"4 rollouts were trained, loop\.num_rollout is 4"):
        first_rollout(config(run_dir, num_rollout=4), run_dir)


def test_never_refuses_a_used_folder(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run\.resume=never, but run\.dir"):
        first_rollout(config(run_dir, resume="never"), run_dir)


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=LATEST):
        first_rollout(config(tmp_path, resume=str(tmp_path)), tmp_path)


def test_a_marker_that_is_no_number_is_refused(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run", "release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        first_rollout(config(run_dir), run_dir)


def test_a_foreign_path_is_refused_where_the_folder_has_its_own(tmp_path: Path) -> None:
    """Else the same command, given again after a crash, would start over and write over what it had."""
    other, run_dir = used_folder(tmp_path / "other"), used_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoints of its own \(iteration 4\): run\.resume=auto"):
        first_rollout(config(run_dir, resume=str(other / "checkpoints")), run_dir)


def test_settings_are_compared_with_the_checkpoints_own(tmp_path: Path) -> None:
    """config.yaml is for people: that it was edited or lost changes nothing."""
    run_dir = used_folder(tmp_path / "run")
    (run_dir / "config.yaml").write_text(to_yaml(config(run_dir, lr=0.0)))
    assert first_rollout(config(run_dir), run_dir) == 4
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"optim\.lr 0\.001 -> 0\.0\)"):
        first_rollout(config(run_dir, lr=0.0), run_dir)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_with_iterations_is_used_also_without_latest(tmp_path: Path, resume: str) -> None:
    run_dir = used_folder(tmp_path / "run")
    (run_dir / "checkpoints" / LATEST).unlink()
    with unchanged(tmp_path), pytest.raises(CheckpointError), launch(config(run_dir, resume=resume)):
        pass
    other = tmp_path / "other"
    with pytest.raises(CheckpointError, match="write 4 into it"):
        first_rollout(config(other, resume=str(run_dir / "checkpoints")), other)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_that_dies_before_its_first_checkpoint_is_named_resumes_where_it_began(
    tmp_path: Path, fresh: bool
) -> None:
    other, run_dir = used_folder(tmp_path / "other"), used_folder(tmp_path / "run")
    shutil.rmtree(iteration_folder(run_dir / "checkpoints", 2))
    (run_dir / "checkpoints" / LATEST).unlink()
    begin_first(run_dir / "checkpoints")
    resume = "auto" if fresh else str(other / "checkpoints")
    assert first_rollout(config(run_dir, resume=resume), run_dir) == (0 if fresh else 4)
    with pytest.raises(CheckpointError, match="no iteration was whole when its run ended"):
        latest_iteration(run_dir / "checkpoints")
