"""Checkpoints and exports of ranks whose nodes do not share ``run.dir``."""

from __future__ import annotations

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import RankJob, Results

pytestmark = pytest.mark.ranks

STAGES, COPIES = Layout(pp=2), Layout(dp=2)
JOBS = {
    2: [
        RankJob("own folders, pp2", "tests.train.own_folders:save_load_and_export", (STAGES,)),
        RankJob("own folders, dp2", "tests.train.own_folders:save_load_and_export", (COPIES,)),
        RankJob("own folders, full disk", "tests.train.own_folders:full_disk_of_rank_zero", (COPIES,)),
        RankJob("own folders, no checkpoint", "tests.train.own_folders:missing_checkpoint", (COPIES,)),
    ]
}


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_rank_0_has_the_whole_checkpoint_and_every_rank_loads_it(layout: str, results: Results) -> None:
    first, second = results[f"own folders, {layout}"]
    assert any(name.startswith("iter_0000001/__1_") for name in first["after save"]), "files of both ranks"
    assert any(name.startswith("iter_0000001/__0_") for name in first["after save"])
    assert "iter_0000001/checkpoint.json" in first["after save"]
    assert second["after save"] == [], "its files were sent and removed"
    for rank in (first, second):
        assert rank["loaded"] and rank["continues"]
    assert second["files"] == [], "its copy was removed after the load"


def test_rank_0_has_the_whole_export(results: Results) -> None:
    first, _ = results["own folders, pp2"]
    exported = {name for name in first["files"] if name.startswith("hf/model-")}
    assert exported == {"hf/model-stage0-00000.safetensors", "hf/model-stage1-00000.safetensors"}
    assert {"hf/config.json", "hf/model.safetensors.index.json"} <= {*first["files"]}


def test_a_full_disk_is_named_on_every_rank_and_the_next_transfer_works(results: Results) -> None:
    first, second = results["own folders, full disk"]
    for rank in (first, second):
        assert rank["error"].startswith("rank 0 on the node of rank 0: ") and "full0/large: " in rank["error"]
        assert rank["equal"]
    assert second["kept"] == ["empty", "large", "small"], "nothing is removed before it has arrived"
    assert first["exists"] and not second["exists"]


def test_a_missing_checkpoint_is_named(results: Results) -> None:
    for message in results["own folders, no checkpoint"]:
        assert "none0/iter_0000003: missing" in message, message
