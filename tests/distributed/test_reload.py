"""Communicators destroyed and rebuilt: users are unaffected, and nothing leaks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.distributed.cycles import CYCLES
from tests.train.jobs import Results

# Four ranks, so that each is in several overlapping groups: rows, columns, pipelines, experts.
LAYOUTS: dict[str, tuple[Layout, str]] = {
    "pp2 dp2 ep2": (Layout(pp=2, dp=2, ep=2), "qwen3_moe"),
    "tp2 sp dp2": (Layout(tp=2, dp=2, sequence_parallel=True), "qwen3"),
    "tp2 sp pp2": (Layout(tp=2, pp=2, sequence_parallel=True), "qwen3"),
}


def call_on_ranks(models: dict[str, Path], folder: Path) -> tuple[Any, ...]:
    """Return the call that the ranks of this file run."""
    return "tests.distributed.cycles:run_all", 4, models, folder, LAYOUTS


@pytest.fixture(scope="module")
def ranks(results: Results) -> list[dict[str, Any]]:
    return results[__name__]


@pytest.mark.ranks
def test_overlapping_groups_compute_the_same_in_every_cycle(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["same"] == rank["generation"] == CYCLES
        assert rank["unchanged"]  # identical objects with their names and ranks
        assert set(rank["calls"].values()) == {2 * (CYCLES + 1)}


@pytest.mark.ranks
def test_released_communicators_leave_no_thread_and_no_descriptor(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        threads, files = rank["before"]
        for now_threads, now_files in rank["released"]:
            # The store's connection stays; on rank 0, its server with a connection per rank.
            assert now_threads <= threads + 2
            assert now_files <= files + 20
        assert rank["held"][0][0] > rank["released"][0][0] + 6  # many threads while in use


@pytest.mark.ranks
def test_nothing_grows_over_the_cycles(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["gloo alone"][-1] == rank["gloo alone"][0]  # gloo does not leak if groups are destroyed
        assert rank["held"][-1] == rank["held"][1]
        assert rank["released"][-1] == rank["released"][1]
        assert rank["keys"][-1] == rank["keys"][1]


@pytest.mark.ranks
def test_refused_operations_name_the_reason(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        messages = rank["refused"]
        assert "cannot be released while irecv has not ended" in messages["in flight"]
        assert "called without slime_like's wrapper, does not support allreduce" in messages["past the wrapper"]
        assert "all_reduce in group world, phase start: its communicators are released" in messages["released"]
        assert "all_gather_object in group world" in messages["released object"]
        for operation in ("removal", "no release"):
            assert re.match(
                r"CollectiveError: the wrapper cannot be removed while \d\d+ groups have releasable communicators",
                messages[operation],
            )
            assert messages[operation].endswith("destroy them first (torch.distributed.destroy_process_group)")


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_trains_the_same_with_released_communicators(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        released_result, plain = rank["released training"][name], rank["plain training"][name]
        assert released_result["digests"] == plain["digests"]
        assert len(set(released_result["digests"])) > 1
        assert released_result["generations"] >= 3
        assert released_result["groups"] > 10


@pytest.mark.ranks
def test_ranks_on_a_cpu_do_not_import_torchs_compiler(ranks: list[dict[str, Any]]) -> None:
    assert [rank["imported"] for rank in ranks] == [[]] * 4
