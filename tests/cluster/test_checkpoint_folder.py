"""Checkpoint folders: removal of partial saves, pruning, and saved groups of an iteration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_like.checkpoint.files import (
    SCRATCH,
    iteration_folder,
    iterations,
    prune,
    publish,
    side_files,
    side_of,
    write_text,
)
from slime_like.cluster.run.checkpoints import remove_leftovers
from slime_like.cluster.run.rollout_state import (
    check_cursor,
    check_num_managers,
    check_state,
    manager_states,
    read_state,
    write_manager_states,
)
from slime_like.cluster.run.rollouts import DemonstrationRollout
from slime_like.cluster.start.resume import first_rollout
from slime_like.data.dump import save_groups
from slime_like.errors import CheckpointError
from tests.cluster.run_folder import (
    config,
    group,
    used_folder,
)
from tests.data.sources import TEN, source, write


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


def test_a_folder_is_replaced_although_an_earlier_replacement_was_killed(tmp_path: Path) -> None:
    target, leftover, scratch = (tmp_path / name for name in ("hf", "hf.replaced.tmp", "hf.tmp"))
    for folder, text in ((target, "second"), (leftover, "first"), (scratch, "third")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    publish(scratch, target)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (target / "config.json").read_text() == "third"


def test_pruning_keeps_the_newest_and_the_latest_iteration(tmp_path: Path) -> None:
    checkpoints = used_folder(tmp_path / "run") / "checkpoints"
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4]
    assert sorted(path.name for path in (checkpoints / "rollout").iterdir()) == side_files(checkpoints, 4)
    iteration_folder(checkpoints, 6).mkdir()  # complete, but not yet in the latest file
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4, 6]


def test_groups_go_with_the_iteration_they_were_saved_in(tmp_path: Path) -> None:
    """Groups of rollouts generated ahead are kept with their iteration, even if no iteration has their own number."""
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


def write_two_managers(folder: Path) -> Path:
    """Write the rollout state of two managers before rollout 3; the second has a rollout ahead and a group in flight."""
    rollout, ahead = folder / "rollout", {"rollout_id": 3, "groups": [], "started": 0.0, "stopped": 1.0}
    records = [{**ahead, "num_generated": 1, "num_refills": 0}]
    states = [
        {"next_rollout": 3, "cursor": {"at": 6}, "made": [], "in_flight": 0},
        {"next_rollout": 3, "cursor": {"at": 8}, "made": records, "in_flight": 1},
    ]
    rollout.mkdir()
    write_manager_states(folder, 3, states)
    for name in ("leftover_3", "leftover_3_manager_1_made_3", "leftover_3_manager_1_in_flight"):
        save_groups(rollout / f"{name}.npz", (group("1 + 1"),))
    return rollout


def test_each_manager_has_its_own_state_and_files(tmp_path: Path) -> None:
    rollout = write_two_managers(tmp_path)
    states = manager_states(read_state(tmp_path, 3))
    assert [state["cursor"]["at"] for state in states] == [6, 8]
    assert {side_of(path) for path in rollout.iterdir()} == {3}, "pruning and hashes know every file"
    check_state(tmp_path, 3)
    for path in rollout.glob("*.npz"):
        path.unlink()  # checks of the cursors do not read groups, which may be gigabytes
    loaded: list[object] = []
    source = SimpleNamespace(load_state=loaded.append)
    check_cursor(tmp_path, 3, source)
    assert loaded == [{"at": 8}, {"at": 6}]
    DemonstrationRollout(cast(Any, source), 1).load(tmp_path, 3)  # supervised fine-tuning after a run with engines
    assert loaded.pop() == {"at": 6}
    check_num_managers(tmp_path, 3, 2)
    for count in (1, 3):
        with pytest.raises(
            CheckpointError, match=rf"state_3.json: saved with .*num_managers=2.* with {count}, .*set .*=2$"
        ):
            check_num_managers(tmp_path, 3, count)
    write_manager_states(tmp_path, 3, states[:1])
    assert manager_states(read_state(tmp_path, 3)) == states[:1] == [read_state(tmp_path, 3)]
    with pytest.raises(CheckpointError, match=r"num_managers=1, and cannot be continued with 2"):
        check_num_managers(tmp_path, 3, 2)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("managers.1.next_rollout", 4, r"is for rollout 4, with \[3\] generated ahead, not for rollout 3"),
        (
            "managers.1.in_flight",
            2,
            "has in_flight=2, but leftover_3_manager_1_in_flight.npz does not contain 2 groups",
        ),
        ("managers.0.in_flight", 1, r"leftover_3_manager_0_in_flight.npz: groups of this checkpoint are missing"),
        ("managers.0.cursor", 5, "cursor"),
        ("managers", [], "has a list of 0 managers"),
    ],
)
def test_damage_to_the_state_of_one_manager_is_named(tmp_path: Path, path: str, change: object, message: str) -> None:
    file = write_two_managers(tmp_path) / "state_3.json"
    state = json.loads(file.read_text())
    *parents, last = path.split(".")
    target = state
    for name in parents:
        target = target[int(name)] if name.isdecimal() else target[name]
    target[last] = change
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=message):
        check_state(tmp_path, 3)


@pytest.mark.parametrize("torn", [True, False])
def test_lost_groups_of_a_checkpoint_are_refused_at_start(tmp_path: Path, torn: bool) -> None:
    folder = tmp_path / "rollout"
    folder.mkdir()
    (folder / "state_3.json").write_text(json.dumps({"next_rollout": 3, "cursor": {}, "made": []}))
    if torn:
        (folder / "leftover_3.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"leftover_3\.npz: groups of this checkpoint .+ another checkpoint"):
        check_state(tmp_path, 3)
    save_groups(folder / "leftover_3.npz", ())
    check_state(tmp_path, 3)


@pytest.mark.parametrize("critic", [False, True])
def test_a_cursor_that_does_not_fit_the_prompts_is_refused_with_what_is_left_to_do(
    tmp_path: Path, critic: bool
) -> None:
    """Checkpoints of the same run have cursors in the same prompts, so none of them is recommended."""
    folder = tmp_path / "checkpoints"
    (folder / "rollout").mkdir(parents=True)
    write_manager_states(folder, 3, [{"cursor": source(write(tmp_path / "a.jsonl", TEN)).state()}])
    check_cursor(folder, 3, source(tmp_path / "a.jsonl"))
    if critic:
        (folder / "critic").mkdir()
    end = rf" and critic\.load={folder}/critic" if critic else ""
    with pytest.raises(
        CheckpointError,
        match=r"state_3\.json does not fit: .*restore data\.train.* or start a new run from the trained weights: choose "
        rf"another run\.dir, remove run\.resume, and set model\.megatron_checkpoint={folder}{end}$",
    ):
        check_cursor(folder, 3, source(write(tmp_path / "b.jsonl", TEN[:9])))
