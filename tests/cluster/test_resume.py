from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.resume import MARKER, first_rollout
from slime_like.config.algo import GrpoConfig
from slime_like.config.load import to_yaml
from slime_like.config.model import OptimConfig
from slime_like.config.root import TrainConfig
from slime_like.config.run import LoopConfig, RunConfig
from slime_like.errors import CheckpointError, ConfigError, RunComplete


def config(run_dir: Path, *, resume: str = "auto", lr: float = 1e-3, num_rollout: int = 10) -> TrainConfig:
    made = TrainConfig(
        algo=GrpoConfig(),
        run=RunConfig(dir=str(run_dir), resume=resume),
        optim=OptimConfig(lr=lr),
        loop=LoopConfig(num_rollout=num_rollout),
    )
    return replace(
        made,
        model=replace(made.model, hf_checkpoint="m"),
        data=replace(made.data, train="t"),
        evaluation=made.evaluation,
    )


def used_folder(run_dir: Path, marker: str = "4") -> Path:
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / MARKER).write_text(marker)
    (run_dir / "config.yaml").write_text(to_yaml(config(run_dir)))
    return run_dir


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


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(RunComplete, match=r"4 rollouts were trained, loop\.num_rollout is 4"):
        first_rollout(config(run_dir, num_rollout=4), run_dir)


def test_never_refuses_a_used_folder(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run\.resume=never, but run\.dir"):
        first_rollout(config(run_dir, resume="never"), run_dir)


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=MARKER):
        first_rollout(config(tmp_path, resume=str(tmp_path)), tmp_path)


def test_a_marker_that_is_no_number_is_refused(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run", "release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        first_rollout(config(run_dir), run_dir)
