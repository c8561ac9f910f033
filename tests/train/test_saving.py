"""Saves continue during training; after a kill or a full disk, the latest file names the newest complete checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.disk import Operation
from tests.train.jobs import RankJob, Results
from tests.train.saving import EXPORT_FULL, FULL

pytestmark = pytest.mark.ranks

JOBS = {
    1: [
        RankJob("save during training, single", "tests.train.saving:save_during_training", (Layout(),)),
        RankJob("kill at every operation", "tests.train.saving:kill_at_every_operation"),
        RankJob("failed write", "tests.train.saving:failed_write"),
        RankJob("full disk of a run", "tests.train.saving:full_disk_of_a_run"),
    ],
    2: [
        RankJob("save during training, dp2", "tests.train.saving:save_during_training", (Layout(dp=2),)),
        RankJob("full disks", "tests.train.saving:full_disks", (Layout(dp=2),)),
        RankJob("slow disk", "tests.train.saving:slow_disk", (Layout(dp=2),)),
        RankJob("full disks of exports", "tests.train.saving:full_disks_of_exports", (Layout(pp=2),)),
    ],
}


@pytest.mark.parametrize("name", ["save during training, single", "save during training, dp2"])
def test_training_during_a_save_does_not_change_the_checkpoint(name: str, results: Results) -> None:
    for rank in results[name]:
        assert rank["complete early"] is False
        assert rank["files"] == ["iter_0000001.tmp"]
        assert rank["complete"] is True
        assert rank["hashed"]
        assert rank["hashed by"] == ["checkpoint"], "hashing does not block training"
        assert rank["loaded"]
        assert rank["continues"]


def test_a_kill_at_every_operation_leaves_a_complete_checkpoint(results: Results) -> None:
    """A resume reads the old checkpoint until the latest file is replaced, and then the new checkpoint."""
    (result,) = results["kill at every operation"]
    iterations: list[int] = result["iterations"]
    operations: list[Operation] = result["operations"]
    assert len(iterations) == len(operations) + 1 > 30  # a kill before each operation, and a complete save
    rename_index = next(i for i, o in enumerate(operations) if o.to.endswith("latest_checkpointed_iteration.txt"))
    assert iterations == [1] * (rename_index + 1) + [2] * (len(operations) - rename_index)
    assert result["num_read"] >= 2


def test_files_are_synced_before_they_are_named(results: Results) -> None:
    """Files are synced before their folder is renamed, and the folder before the latest file, as power may fail."""
    (result,) = results["kill at every operation"]
    operations: list[Operation] = result["operations"]

    def first(event: str, path: str = "", to: str = "") -> int:
        return next(i for i, o in enumerate(operations) if o.event == event and path in o.path and o.to.endswith(to))

    target = first("os.rename", "iter_0000002.tmp", "iter_0000002")
    rename_index = first("os.rename", "latest", "latest_checkpointed_iteration.txt")
    opened_paths = {o.path for o in operations[:target] if o.event == "open" and "iter_0000002.tmp/" in o.path}
    final_paths = {path.removesuffix(".tmp") for path in opened_paths if not path.endswith("iter_0000002.tmp")}
    assert len(final_paths) >= 4
    for path in final_paths:
        assert any(o == Operation("fsync", path) for o in operations[:target]), path
    synced_names = [o.path.rsplit("/", 1)[-1] for o in operations[target:rename_index] if o.event == "fsync"]
    record_names = ["checkpoint.json.tmp", "iter_0000002"]  # the driver adds the settings of the run
    assert synced_names == ["checkpoints", *record_names, "latest_checkpointed_iteration.txt.tmp"]
    removal_indices = [i for i, o in enumerate(operations) if "iter_0000001" in o.path]
    assert min(removal_indices) > rename_index


@pytest.mark.parametrize("name", [*FULL, "shard"])
def test_a_full_disk_on_one_rank_is_an_error_on_all(name: str, results: Results) -> None:
    for rank in results["full disks"]:
        text: str = rank["errors"][name]
        assert "iter_0000002" in text
        assert "disk" in text
        assert "rank 1: " in text or name != "shard"
        assert ("File too large" if name == "shard" else "No space left on device") in text
        assert rank["files"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert rank["first is intact"]
        assert rank["latest"] == 3


def test_a_disk_that_does_not_answer_fails_the_save_on_all_ranks(results: Results) -> None:
    """No rank waits for the timeout of a collective. The next save of the same iteration succeeds."""
    for rank in results["slow disk"]:
        assert "iter_0000002: the save failed (rank 1: the save waited " in rank["error"]
        assert "iter_0000002.tmp in phase 'save'" in rank["error"] and "rank 0: " not in rank["error"]
        assert rank["seconds"] < 30
        assert "90% of loop.step_deadline_s=1" in rank["error"]
        assert rank["files"] == ["iter_0000001", "iter_0000002.tmp", "latest_checkpointed_iteration.txt"]
        assert rank["latest"] == 2


def test_a_failed_write_leaves_no_cycle_to_the_garbage_collector(results: Results) -> None:
    """Python before 3.12.2 crashes on a cycle with the buffer of a BytesIO."""
    (result,) = results["failed write"]
    assert result == {"error": "OSError: [Errno 28] No space left on device", "freed": True}


@pytest.mark.parametrize(("name", "raises"), [("stop False", True), ("continue False", False), ("continue True", True)])
def test_on_failed_save_decides_if_a_full_disk_ends_the_run(name: str, raises: bool, results: Results) -> None:
    (out,) = results["full disk of a run"]
    message, latest = out[name]
    assert ("iter_0000002: the save failed" in message) is raises
    assert latest == "3"
    rollout: Any = out.get(f"rollout state, {name}")
    if name.startswith("stop"):
        assert "state_2.json" in rollout
    else:
        assert rollout is None


@pytest.mark.parametrize("name", [*EXPORT_FULL, "shard"])
def test_an_export_that_fails_on_one_rank_fails_on_all_and_keeps_the_previous_export(
    name: str, results: Results
) -> None:
    for rank in results["full disks of exports"]:
        text: str = rank["errors"][name]
        assert "/hf" in text
        assert "disk" in text
        assert "rank 1: model-stage1-00000.safetensors: " in text or name != "shard"
        assert ("File too large" if name == "shard" else "No space left on device") in text
        assert rank["remaining"] == ["hf"]
        assert rank["unchanged"]
        assert rank["replaced"]


def test_an_export_is_synced_before_it_is_renamed(results: Results) -> None:
    first, second = results["full disks of exports"]
    operations: list[Operation] = first["operations"]
    rename_index = next(i for i, o in enumerate(operations) if o.to.endswith("/hf"))
    synced_names = {o.path.rsplit("/", 1)[-1] for o in operations[:rename_index] if o.event == "fsync"}
    assert synced_names >= {*first["files"], "hf.tmp"}
    assert "model-stage1-00000.safetensors" in {o.path.rsplit("/", 1)[-1] for o in second["operations"]}
