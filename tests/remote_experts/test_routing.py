"""Buckets cover every remote pair once, consecutive tokens are not copied, and the mode follows measured rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.mode import PROBE_INTERVAL, STREAM_ROWS, ModeChooser
from slime_like_plugins.remote_experts.routing import ONE_REQUEST_ROWS, ExpertRows, split
from slime_like_plugins.remote_experts.shapes import ExpertShapes
from tests.hypothesis_examples import num_examples
from tests.remote_experts.workers import reference, weights_of

NUM_EXPERTS = 6
MATRICES = weights_of(ExpertShapes((0,), (NUM_EXPERTS,), 8, 12, "float32", 64, 3))[0]


@settings(max_examples=num_examples(40))
@given(
    st.integers(0, 2 * ONE_REQUEST_ROWS),
    st.sets(st.integers(0, NUM_EXPERTS - 1)),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
)
def test_local_and_remote_sums_are_those_of_all_experts(num: int, remote: set[int], size: int, seed: int) -> None:
    """The sums are equal with ids of -1, weights of 0, and no remote or local experts; no token is in two requests."""
    rng = np.random.default_rng(seed)
    rows = ExpertRows(NUM_EXPERTS, sorted(remote))
    ids = np.array([rng.permutation(NUM_EXPERTS)[:3] for _ in range(num)], np.int32).reshape(num, 3)
    ids[rng.random(ids.shape) < 0.1] = -1
    weights = np.where((rng.random(ids.shape) < 0.2) | (ids < 0), 0, rng.random(ids.shape)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((num, 8)).astype(np.float32))
    local, buckets = split(ids, weights, rows)
    is_remote = torch.from_numpy(np.isin(np.arange(NUM_EXPERTS), rows.remote))
    parts = {name: (matrix[~is_remote], matrix[is_remote]) for name, matrix in MATRICES.items()}
    sums = expert_sums(x, local, weights, parts["w13"][0], parts["w2"][0])
    tokens: list[int] = []
    for bucket in buckets:
        for chunk in bucket.chunks(size):
            assert 0 < len(chunk.tokens) <= size and chunk.ids.shape == chunk.weights.shape
            assert ((chunk.weights != 0) == (chunk.ids >= 0)).all() and (chunk.ids >= 0).any(1).all()
            answer = expert_sums(chunk.rows_of(x), chunk.ids, chunk.weights, parts["w13"][1], parts["w2"][1])
            sums[chunk.index()] += answer
            tokens += chunk.tokens.tolist()
    assert len(tokens) == len({*tokens})
    if len(tokens) <= ONE_REQUEST_ROWS:
        assert len(buckets) == bool(tokens)  # one request
    else:
        assert all((bucket.ids >= 0).all() for bucket in buckets)
    np.testing.assert_allclose(sums, reference(x, ids, weights, MATRICES), atol=2e-6)


def test_a_bucket_of_consecutive_tokens_is_a_view() -> None:
    x = torch.zeros(10, 4)
    ids = np.array([[0], [0], [1], [1], [1], [0], [1], [0], [0], [0]], np.int32)
    _, (bucket,) = split(ids, np.ones(ids.shape, np.float32), ExpertRows(2, [1]))
    assert bucket.tokens.tolist() == [2, 3, 4, 6]
    first, second = bucket.chunks(3)
    assert first.rows_of(x).data_ptr() == x[2:].data_ptr() and len(first.rows_of(x)) == 3
    assert second.rows_of(x).shape == (1, 4)
    _, (every,) = split(np.ones((10, 1), np.int32), np.ones((10, 1), np.float32), ExpertRows(2, [1]))
    assert every.rows_of(x).data_ptr() == x.data_ptr() and len(every.rows_of(x)) == 10
    apart = split(ids, np.ones(ids.shape, np.float32), ExpertRows(2, [0]))[1][0]
    assert apart.rows_of(x).data_ptr() != x.data_ptr()


def measure(chooser: ModeChooser, seconds: dict[str, float], local: float, count: int) -> dict[str, int]:
    """Record ``count`` measurements of a worker with these times; return how often each mode was used."""
    mode_counts = dict.fromkeys(seconds, 0)
    for _ in range(count):
        mode = chooser.next_mode
        mode_counts[mode] += 1
        chooser.record(1000, max(local, seconds[mode]), max(0.0, seconds[mode] - local))
    return mode_counts


@pytest.mark.parametrize(
    ("seconds", "local", "expected"),
    [
        ({"batched": 0.9, "stream": 0.1}, 1.0, "batched"),  # the worker keeps up, so stream is never measured
        ({"batched": 10.0, "stream": 12.0}, 1.0, "batched"),
        ({"batched": 10.0, "stream": 7.0}, 1.0, "stream"),
    ],
)
def test_auto_is_close_to_the_faster_mode(seconds: dict[str, float], local: float, expected: str) -> None:
    chooser = ModeChooser()
    mode_counts = measure(chooser, seconds, local, 1000)
    assert chooser.mode == expected and mode_counts[expected] >= 970
    elapsed = sum(count * max(local, seconds[mode]) for mode, count in mode_counts.items())
    assert elapsed < 1.1 * 1000 * min(max(local, time) for time in seconds.values())
    if expected == "batched" and local >= 1:
        assert mode_counts["stream"] == (0 if seconds["batched"] < local else 2 * -(-1000 // (PROBE_INTERVAL + 2)))


def test_auto_follows_a_worker_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    chooser = ModeChooser()
    with caplog.at_level("INFO"):
        measure(chooser, {"batched": 10.0, "stream": 7.0}, 1.0, 300)
        assert chooser.mode == "stream"
        measure(chooser, {"batched": 1.0, "stream": 3.0}, 1.0, 300)
    assert chooser.mode == "batched" and chooser.changes == 2
    assert "change from batched to stream mode: 143 instead of 100 rows/s" in caplog.text


def test_the_first_decision_is_logged_even_if_the_mode_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        measure(ModeChooser(), {"batched": 10.0, "stream": 12.5}, 1.0, 1000)
    assert [record.getMessage() for record in caplog.records] == [
        "slime_like remote experts keep batched mode: 100 rows/s, stream mode 80 rows/s"
    ]


@pytest.mark.parametrize("setting", ["batched", "stream"])
def test_a_mode_that_is_set_is_kept(setting: str) -> None:
    chooser: Any = ModeChooser(setting)
    assert measure(chooser, {"batched": 10.0, "stream": 1.0}, 1.0, 300)[setting] == 300
    small = ModeChooser()
    small.record(STREAM_ROWS, 10.0, 9.0)
    assert not small.rates
