"""Device memory of an export that every rank gathers."""

from __future__ import annotations

import pytest

from tests.train.jobs import RankJob, Results

pytestmark = pytest.mark.ranks
NAME = "live tensors of an export"
JOBS = {1: [RankJob(NAME, "tests.train.export_memory:count_live")]}


def test_a_bucket_of_an_export_is_dropped_before_the_next_one_is_gathered(results: Results) -> None:
    """One tensor is in memory at a gather: a bucket is complete only once the next bucket's tensor is gathered."""
    (names, num_live), *_ = results[NAME]
    assert names == [f"w{index}" for index in range(5)]
    assert num_live == [0, 1, 1, 1, 1]
