"""Resume: the first rollout is determined, and the checkpoint verified, before any process starts."""

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
from slime_like.cluster.plan.verify import verify_initial_checkpoints
from slime_like.cluster.start.launch import launch
from slime_like.cluster.start.resume import first_rollout
from slime_like.config.load.loader import to_yaml
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError, RunComplete
from tests.cluster.run_folder import config, record_run, used_folder
from tests.unchanged import unchanged


def with_changes(cfg: TrainConfig, changes: dict[str, dict[str, object]]) -> TrainConfig:
    """Return ``cfg`` with other values: group -> key -> value."""
    return replace(cfg, **{group: replace(getattr(cfg, group), **values) for group, values in changes.items()})


def test_an_empty_folder_starts_at_rollout_0(tmp_path: Path) -> None:
    assert first_rollout(config(tmp_path), tmp_path) == 0


def test_auto_resumes_with_a_larger_num_rollout(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    assert first_rollout(config(run_dir, num_rollout=20), run_dir) == 4


def test_auto_refuses_changed_settings_and_names_the_fix(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"optim\.lr 0\.001 -> 0\.0\): start a new run .*: choose another run\.dir, .*run\.resume=.*checkpoints",
    ):
        first_rollout(config(run_dir, lr=0.0), run_dir)
    assert first_rollout(config(run_dir, lr=0.0, resume=str(run_dir / "checkpoints")), run_dir) == 4


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"num_managers": 2, "num_engines": 2}}, r"num_managers=1, .*: set rollout\.num_managers=1$"),
        (
            {"parallel": {"distributed_optimizer": False}},
            r"parallel\.distributed_optimizer=True, which cannot be loaded with False: restore the saved value$",
        ),
    ],
)
def test_a_key_with_a_check_of_its_own_is_refused_with_the_value_to_restore(
    tmp_path: Path, changes: dict[str, dict[str, object]], words: str, by_path: bool
) -> None:
    """A resume by path could not continue either, so ``auto`` must not recommend it."""
    run_dir = used_folder(tmp_path / "run")
    other_dir = tmp_path / "other"
    if by_path:
        shutil.copytree(run_dir / "model", other_dir / "model")
        shutil.copy(run_dir / "train.jsonl", other_dir)
    cfg = config(other_dir, resume=str(run_dir / "checkpoints")) if by_path else config(run_dir)
    with pytest.raises(CheckpointError, match=f"saved with .*{words}"), launch(with_changes(cfg, changes)):
        pass


@pytest.mark.parametrize(
    ("changes", "by_path", "condition"),
    [
        ({"run": {"seed": 7}}, False, False),
        ({"data": {"shuffle": False}}, False, False),
        ({"data": {"label_key": "answer"}}, True, True),
        ({"rollout": {"max_context_len": 77}}, True, True),
        ({"model": {"hf_checkpoint": "other_model"}}, True, True),
        ({"optim": {"lr": 0.5}}, True, False),
    ],
)
def test_a_resume_by_path_is_recommended_only_if_it_may_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, dict[str, object]],
    by_path: bool,
    condition: bool,
) -> None:
    """A checkpoint has a position in its prompts, which fits neither other prompts nor another order."""
    run_dir = used_folder(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_dir / "model", "other_model")
    words = rf"start a new run .* model\.megatron_checkpoint={run_dir}/checkpoints(, or|$)"
    with pytest.raises(ConfigError, match=words) as error_info:
        first_rollout(with_changes(config(run_dir), changes), run_dir)
    message = str(error_info.value)
    assert (f"set run.resume={run_dir}/checkpoints to continue with the new settings" in message) == by_path
    assert ("refused if they give other prompts or labels" in message) == condition


def test_the_new_run_of_a_ppo_user_starts_from_the_critic_too(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    folder = run_dir / "checkpoints"
    (folder / "critic").mkdir()
    words = rf"model\.megatron_checkpoint={folder} and critic\.load={folder}/critic, or set run\.resume={folder} to"
    with pytest.raises(ConfigError, match=words):
        first_rollout(config(run_dir, lr=0.0), run_dir)


def test_changed_data_is_refused_and_its_weights_may_start_a_new_run(tmp_path: Path) -> None:
    run_dir, other_dir = used_folder(tmp_path / "run"), tmp_path / "other"
    (run_dir / "train.jsonl").write_text('{"input": "2 + 2", "label": "4"}\n')
    checkpoints = run_dir / "checkpoints"
    words = "to continue with the current files, which is refused if they give other prompts or labels$"
    with pytest.raises(ConfigError, match=rf"data\.train changed .*megatron_checkpoint={checkpoints}, .*{words}"):
        first_rollout(config(run_dir), run_dir)
    cfg = config(run_dir)
    cfg = replace(cfg, model=replace(cfg.model, megatron_checkpoint=str(checkpoints)))
    assert first_rollout(replace(cfg, run=replace(cfg.run, dir=str(other_dir))), other_dir) == 0
    verify_initial_checkpoints(cfg)


@pytest.mark.parametrize("replays_first", [False, True])
def test_auto_resumes_between_training_and_replays(replays_first: bool, tmp_path: Path) -> None:
    """A replay does not read data.train, so there is nothing to compare."""
    run_dir = used_folder(tmp_path)
    base = config(run_dir)
    replay = replace(base, run=replace(base.run, mode="train_only", replay_from=str(run_dir / "rollouts")))
    record_run(run_dir, replay if replays_first else base)
    assert first_rollout(base if replays_first else replay, run_dir) == 4


def test_auto_resumes_with_other_guard_settings(tmp_path: Path) -> None:
    """Guard settings may change: error messages about memory and deadlines tell users to change them."""
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    cfg = replace(cfg, guard=replace(cfg.guard, action="trim", deadline_s=900.0))
    assert first_rollout(cfg, run_dir) == 4


def test_auto_resumes_with_another_layout_of_the_engines(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    assert first_rollout(replace(cfg, rollout=replace(cfg.rollout, tp=4, engine_num_nodes=2)), run_dir) == 4


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(RunComplete, match=r"4 rollouts trained, loop\.num_rollout is 4"):
        first_rollout(config(run_dir, num_rollout=4), run_dir)


def test_never_refuses_a_used_folder(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run\.resume=never, but run\.dir"):
        first_rollout(config(run_dir, resume="never"), run_dir)


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=LATEST):
        first_rollout(config(tmp_path, resume=str(tmp_path)), tmp_path)


def test_a_marker_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run", "release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        first_rollout(config(run_dir), run_dir)


def test_a_foreign_path_is_refused_if_the_folder_has_checkpoints(tmp_path: Path) -> None:
    """Without the refusal, the same command would start over after a crash and overwrite its checkpoints."""
    other_dir, run_dir = used_folder(tmp_path / "other"), used_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoints of its own \(iteration 4\): run\.resume=auto"):
        first_rollout(config(run_dir, resume=str(other_dir / "checkpoints")), run_dir)


def test_settings_are_compared_with_the_checkpoint_record(tmp_path: Path) -> None:
    """config.yaml is informative only: editing or losing it has no effect."""
    run_dir = used_folder(tmp_path / "run")
    (run_dir / "config.yaml").write_text(to_yaml(config(run_dir, lr=0.0)))
    assert first_rollout(config(run_dir), run_dir) == 4
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"optim\.lr 0\.001 -> 0\.0\)"):
        first_rollout(config(run_dir, lr=0.0), run_dir)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_with_iterations_counts_as_used_without_latest(tmp_path: Path, resume: str) -> None:
    run_dir = used_folder(tmp_path / "run")
    (run_dir / "checkpoints" / LATEST).unlink()
    with unchanged(tmp_path), pytest.raises(CheckpointError), launch(config(run_dir, resume=resume)):
        pass
    other_dir = tmp_path / "other"
    with pytest.raises(CheckpointError, match="write 4 into it"):
        first_rollout(config(other_dir, resume=str(run_dir / "checkpoints")), other_dir)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_that_died_before_its_first_checkpoint_restarts(tmp_path: Path, fresh: bool) -> None:
    other_dir, run_dir = used_folder(tmp_path / "other"), used_folder(tmp_path / "run")
    shutil.rmtree(iteration_folder(run_dir / "checkpoints", 2))
    (run_dir / "checkpoints" / LATEST).unlink()
    begin_first(run_dir / "checkpoints")
    resume = "auto" if fresh else str(other_dir / "checkpoints")
    assert first_rollout(config(run_dir, resume=resume), run_dir) == (0 if fresh else 4)
    with pytest.raises(CheckpointError, match="no iteration was complete when its run ended"):
        latest_iteration(run_dir / "checkpoints")
