"""Failed saves: they neither break the next save nor leave the save of another role open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from slime_like.checkpoint.files import iterations, name_latest, prune, resumable_iteration
from slime_like.cluster.run.checkpoints import Checkpoints
from slime_like.cluster.workers.multi_role_trainer import MultiRoleTrainer
from slime_like.config.schema.run import RunConfig
from slime_like.errors import CheckpointError


@dataclass
class Saver:
    """Fake trainer of one role: one save at a time, with planned failures."""

    fails_to_begin: set[int] = field(default_factory=set[int])
    fails_to_finish: set[int] = field(default_factory=set[int])
    slow: set[int] = field(default_factory=set[int])
    open: int | None = None
    written: list[int] = field(default_factory=list[int])

    def begin_save(self, folder: Path, iteration: int) -> None:
        assert self.open is None, f"the save of {self.open} was left open"
        if iteration in self.fails_to_begin:
            raise CheckpointError("no space to begin")
        self.open = iteration
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)

    def finish_save(self, *, wait: bool) -> bool:
        if self.open is None:
            return True
        if self.open in self.slow and not wait:
            return False
        iteration, self.open = self.open, None
        if iteration in self.fails_to_finish:
            raise CheckpointError("no space to finish")
        self.written.append(iteration)
        return True


class NoRollout:
    """Fake ``RolloutSource`` with nothing to save."""

    def save(self, folder: Path, next_rollout: int) -> None: ...


def checkpoints(folder: Path, trainer: object, on_failed_save: str) -> Checkpoints:
    config = RunConfig(on_failed_save=on_failed_save)
    return Checkpoints(folder, cast(Any, trainer), cast(Any, NoRollout()), config, enabled=True, last=0)


def latest(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text().strip()


def test_a_failed_save_does_not_cost_the_next_one(tmp_path: Path) -> None:
    trainer = Saver(fails_to_finish={1})
    run = checkpoints(tmp_path, trainer, "continue")
    run.save(1)
    run.save(2)
    run.save(3, final=True)
    assert trainer.written == [2, 3]
    assert latest(tmp_path) == "3"


def test_an_unfinished_first_save_is_not_a_lost_latest_file(tmp_path: Path) -> None:
    run = checkpoints(tmp_path, Saver(slow={1}), "stop")
    run.save(1)
    assert iterations(tmp_path) == [1], "the folder has its name before the latest file does"
    assert resumable_iteration(tmp_path) is None
    run.save(1, wait=True)
    assert resumable_iteration(tmp_path) == 1


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def already_removed(folder: Path, keep: int) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(folder / "iter_0000001"))

    monkeypatch.setattr("slime_like.cluster.run.checkpoints.prune", already_removed)
    run = checkpoints(tmp_path, Saver(), "stop")
    run.config.keep_checkpoints = 1
    run.save(1, wait=True)
    assert latest(tmp_path) == "1"
    assert "iter_0000001: an old checkpoint could not be removed (No such file" in capsys.readouterr().err


def test_partially_removed_checkpoints_are_pruned(tmp_path: Path) -> None:
    for name in ("iter_0000001", "iter_0000002", "iter_0000001.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    name_latest(tmp_path, 2)
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("iter*")) == ["iter_0000002"]


def test_a_final_save_is_tried_after_a_failed_save(tmp_path: Path) -> None:
    trainer = Saver(fails_to_finish={1})
    run = checkpoints(tmp_path, trainer, "continue")
    run.save(1)
    run.save(2, final=True)
    assert latest(tmp_path) == "2"


def test_with_stop_the_failure_ends_the_run(tmp_path: Path) -> None:
    run = checkpoints(tmp_path, Saver(fails_to_finish={1}), "stop")
    run.save(1)
    with pytest.raises(CheckpointError, match="no space to finish"):
        run.save(2)


@pytest.mark.parametrize("fault", ["fails_to_begin", "fails_to_finish"])
def test_an_actor_that_fails_leaves_no_save_of_the_critic_open(tmp_path: Path, fault: str) -> None:
    actor, critic = Saver(), Saver(slow={1})
    setattr(actor, fault, {1})
    run = checkpoints(tmp_path, multi_role_trainer(actor, critic), "continue")
    run.save(1)
    run.poll()
    run.save(2, final=True)
    assert critic.open is None
    assert actor.written == [2]
    assert latest(tmp_path) == "2"


def multi_role_trainer(actor: Saver, critic: Saver) -> MultiRoleTrainer:
    """Return a ``MultiRoleTrainer`` that can only save."""
    trainers = object.__new__(MultiRoleTrainer)
    trainers.actor, trainers.critic = cast(Any, actor), cast(Any, critic)
    return trainers
