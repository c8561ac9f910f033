"""Checkpoints resume the same run; damaged and foreign checkpoints are refused with the file's name."""

from __future__ import annotations

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import RankJob, Results

pytestmark = pytest.mark.ranks

SAVED = "save dp2"
JOBS = {
    1: [
        RankJob("save single", "tests.train.lifecycle:save_then_continue", (Layout(),)),
        RankJob("resume single", "tests.train.lifecycle:resume", ("save single", Layout())),
        RankJob("resume other lr", "tests.train.lifecycle:resume", ("save single", Layout(), 5e-4)),
        RankJob("bad checkpoints", "tests.train.lifecycle:load_damaged", ("save single",)),
    ],
    2: [
        RankJob(SAVED, "tests.train.lifecycle:save_then_continue", (Layout(dp=2),)),
        RankJob("resume dp2", "tests.train.lifecycle:resume", (SAVED, Layout(dp=2))),
    ],
}


def test_resume_is_the_same_run_bit_for_bit(results: Results) -> None:
    for uninterrupted, resumed in zip(
        [*results["save single"], *results[SAVED]], [*results["resume single"], *results["resume dp2"]], strict=True
    ):
        assert resumed["iteration"] == 2 and resumed["version"] == 2
        assert resumed["losses"] == uninterrupted["losses"]
        assert resumed["weights"] == uninterrupted["weights"]
        assert resumed["random"] == uninterrupted["random"]  # the RNG state is restored


def test_a_resumed_run_follows_its_own_learning_rate(results: Results) -> None:
    (result,) = results["resume other lr"]
    assert result["lr"] == 5e-4 and result["iteration"] == 2


def test_a_save_leaves_no_process_behind(results: Results) -> None:
    """A save does not start the Manager process of upstream's result queue, which would import the main program."""
    assert all(r["children"] == [] for r in [*results["save single"], *results[SAVED]])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("nothing there", "latest_checkpointed_iteration.txt: missing; choose a folder"),
        ("latest lost", "latest_checkpointed_iteration.txt: missing, though"),
        ("latest is not a number", "'ten', which is not an iteration"),
        ("metadata lost", "metadata.json: missing"),
        ("shard cut", "distcp: has the wrong size"),
        ("shard flipped", "distcp: changed since it was written"),
        ("other model", "its tie_word_embeddings is True, but False in model.hf_checkpoint"),
        ("plain optimizer", "parallel.distributed_optimizer=True"),
    ],
)
def test_bad_checkpoint_is_refused(name: str, names: str, results: Results) -> None:
    (errors,) = results["bad checkpoints"]
    assert errors[name].startswith("CheckpointError: ")
    assert names in errors[name]
