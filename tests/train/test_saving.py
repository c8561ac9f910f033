"""A save does not hold training up, and whatever dies or is full in between, the newest whole checkpoint is the named one."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.disk import Operation
from tests.train.jobs import Job, Results
from tests.train.saving import EXPORT_FULL, FULL

pytestmark = pytest.mark.ranks

JOBS = {
    1: [
        Job("save beside, single", "tests.train.saving:save_beside_training", (Layout(),)),
        Job("die everywhere", "tests.train.saving:die_everywhere"),
        Job("full disk of a run", "tests.train.saving:full_disk_of_a_run"),
    ],
    2: [
        Job("save beside, dp2", "tests.train.saving:save_beside_training", (Layout(dp=2),)),
        Job("full disks", "tests.train.saving:full_disks", (Layout(dp=2),)),
        Job("full disks of exports", "tests.train.saving:full_disks_of_exports", (Layout(pp=2),)),
    ],
}


@pytest.mark.parametrize("name", ["save beside, single", "save beside, dp2"])
def test_what_is_trained_while_files_are_written_is_not_in_them(name: str, results: Results) -> None:
    for rank in results[name]:
        assert rank["early"] is False
        assert rank["seen"] == ["iter_0000001.tmp"]
        assert rank["late"] is True
        assert rank["hashed"]
        assert rank["hashed by"] == ["checkpoint"], "the hashes hold nothing up"
        assert rank["loaded"]
        assert rank["goes on"]


def test_death_at_every_point_leaves_a_whole_checkpoint(results: Results) -> None:
    """Before the latest file is replaced the old one is read, after it the new one; there is no third case."""
    (walk,) = results["die everywhere"]
    found: list[int] = walk["found"]
    operations: list[Operation] = walk["operations"]
    assert len(found) == len(operations) + 1 > 30  # dying before each of them, and living through all
    named = next(i for i, o in enumerate(operations) if o.to.endswith("latest_checkpointed_iteration.txt"))
    assert found == [1] * (named + 1) + [2] * (len(operations) - named)
    assert walk["read"] >= 2


def test_nothing_is_named_before_it_is_on_the_disk(results: Results) -> None:
    """A power failure loses what was not synced: every file before its folder gets the name, the name before the latest file."""
    (walk,) = results["die everywhere"]
    operations: list[Operation] = walk["operations"]

    def first(event: str, path: str = "", to: str = "") -> int:
        return next(i for i, o in enumerate(operations) if o.event == event and path in o.path and o.to.endswith(to))

    target = first("os.rename", "iter_0000002.tmp", "iter_0000002")
    named = first("os.rename", "latest", "latest_checkpointed_iteration.txt")
    written = {o.path for o in operations[:target] if o.event == "open" and "iter_0000002.tmp/" in o.path}
    kept = {path.removesuffix(".tmp") for path in written if not path.endswith("iter_0000002.tmp")}
    assert len(kept) >= 4
    for path in kept:
        assert any(o == Operation("fsync", path) for o in operations[:target]), path
    synced = [o.path.rsplit("/", 1)[-1] for o in operations[target:named] if o.event == "fsync"]
    recorded = ["checkpoint.json.tmp", "iter_0000002"]  # the settings of the run
    assert synced == ["checkpoints", *recorded, "latest_checkpointed_iteration.txt.tmp"]
    removed = [i for i, o in enumerate(operations) if "iter_0000001" in o.path]
    assert min(removed) > named


@pytest.mark.parametrize("name", [*FULL, "shard"])
def test_a_full_disk_on_one_rank_is_an_error_on_all(name: str, results: Results) -> None:
    for rank in results["full disks"]:
        text: str = rank["errors"][name]
        assert "iter_0000002" in text
        assert "disk" in text
        assert "rank 1: " in text or name != "shard"
        assert ("File too large" if name == "shard" else "No space left on device") in text
        assert rank["left"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert rank["first is whole"]
        assert rank["latest"] == 3


@pytest.mark.parametrize(("name", "says"), [("stop False", True), ("continue False", False), ("continue True", True)])
def test_a_run_on_a_full_disk_ends_or_goes_on_as_told(name: str, says: bool, results: Results) -> None:
    (out,) = results["full disk of a run"]
    seen, latest = out[name]
    assert ("iter_0000002: the save failed" in seen) is says
    assert latest == "3"
    rollout: Any = out.get(f"rollout side, {name}")
    if name.startswith("stop"):
        assert "state_2.json" in rollout
    else:
        assert rollout is None


@pytest.mark.parametrize("name", [*EXPORT_FULL, "shard"])
def test_an_export_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(name: str, results: Results) -> None:
    for rank in results["full disks of exports"]:
        text: str = rank["errors"][name]
        assert "/hf" in text
        assert "disk" in text
        assert "rank 1: model-stage1-00000.safetensors: " in text or name != "shard"
        assert ("File too large" if name == "shard" else "No space left on device") in text
        assert rank["left"] == ["hf"]
        assert rank["kept"]
        assert rank["then"]


def test_an_export_is_on_the_disk_before_it_has_its_name(results: Results) -> None:
    first, second = results["full disks of exports"]
    operations: list[Operation] = first["operations"]
    named = next(i for i, o in enumerate(operations) if o.to.endswith("/hf"))
    synced = {o.path.rsplit("/", 1)[-1] for o in operations[:named] if o.event == "fsync"}
    assert synced >= {*first["files"], "hf.tmp"}
    assert "model-stage1-00000.safetensors" in {o.path.rsplit("/", 1)[-1] for o in second["operations"]}
