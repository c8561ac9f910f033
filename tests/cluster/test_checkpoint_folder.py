"""Checkpoint folders: removal of partial saves, pruning, and saved groups of an iteration."""

import json
from pathlib import Path

import pytest

from slime_like.checkpoint.files import (
    SCRATCH,
    iteration_folder,
    iterations,
    prune,
    side_files,
    write_text,
)
from slime_like.cluster.run.checkpoints import remove_leftovers
from slime_like.cluster.run.rollouts import read_state
from slime_like.cluster.start.resume import first_rollout
from slime_like.data.dump import save_groups
from slime_like.errors import CheckpointError
from tests.cluster.run_folder import (
    config,
    used_folder,
)


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    before = sorted(run_dir.rglob("*"))
    for name in ("checkpoints/iter_0000006.tmp", "checkpoints/critic/iter_0000006.tmp", "hf_iter_0000006.tmp"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "__0_0.distcp").write_text("half")
    for name in ("checkpoints/rollout/state_6.json.tmp", "rollouts/rollout_0000006.npz.tmp"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("half")
    remove_leftovers(run_dir)
    for name in ("checkpoints/critic", "rollouts"):
        (run_dir / name).rmdir()
    assert sorted(run_dir.rglob("*")) == before
    assert first_rollout(config(run_dir), run_dir) == 4


def test_a_failed_replacement_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state_1.json"
    path.write_text("old")
    path.with_name(path.name + SCRATCH).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        write_text(path, "new")
    assert error.value.filename == str(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("state_1.json", "old")]


def test_pruning_keeps_the_newest_and_the_latest_iteration(tmp_path: Path) -> None:
    checkpoints = used_folder(tmp_path / "run") / "checkpoints"
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4]
    assert sorted(path.name for path in (checkpoints / "rollout").iterdir()) == side_files(checkpoints, 4)
    iteration_folder(checkpoints, 6).mkdir()  # complete, but not yet in the latest file
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4, 6]


def test_groups_go_with_the_iteration_they_were_saved_in(tmp_path: Path) -> None:
    """Groups of rollouts generated ahead have rollout numbers that need not be saved iterations."""
    rollout = used_folder(tmp_path / "run") / "checkpoints" / "rollout"
    for name in ("leftover_2", "leftover_2_made_2", "leftover_2_made_3", "leftover_4", "leftover_4_made_5"):
        save_groups(rollout / f"{name}.npz", ())
    write_text(rollout / "state_3.json", "{}")  # from a failed save
    write_text(rollout / "state_5.json", "{}")  # from a save in progress
    prune(rollout.parent, 1)
    assert sorted(path.name for path in rollout.iterdir()) == [
        "leftover_4.npz",
        "leftover_4_in_flight.npz",
        "leftover_4_made_4.npz",
        "leftover_4_made_5.npz",
        "state_4.json",
        "state_5.json",
    ]


@pytest.mark.parametrize("torn", [True, False])
def test_lost_groups_of_a_checkpoint_are_refused_at_start(tmp_path: Path, torn: bool) -> None:
    folder = tmp_path / "rollout"
    folder.mkdir()
    (folder / "state_3.json").write_text(json.dumps({"next_rollout": 3, "cursor": {}, "made": []}))
    if torn:
        (folder / "leftover_3.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"leftover_3\.npz: groups of this checkpoint .+ another checkpoint"):
        read_state(tmp_path, 3)
    save_groups(folder / "leftover_3.npz", ())
    assert read_state(tmp_path, 3)["next_rollout"] == 3
