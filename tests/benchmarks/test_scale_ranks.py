"""Simulated ranks of ``benchmarks/scale.py`` under the real ``TrainerGroup``, called in this process instead of through Ray."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.scale_ranks import SimulatedRank
from slime_like.cluster.workers import trainer_group
from slime_like.errors import WeightSyncError

scale: Any = importlib.import_module("benchmarks.scale")
scale_ranks: Any = importlib.import_module("benchmarks.scale_ranks")


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls through Ray by calls of the objects themselves."""

    def call(rank: SimulatedRank, method: Callable[..., Any], *arguments: Any) -> Any:
        return getattr(rank, method.__name__)(*arguments)

    def wait_all(results: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        return dict(results)

    for function in (call, wait_all):
        monkeypatch.setattr(trainer_group, function.__name__, function)
    monkeypatch.setattr(trainer_group, "put", lambda value: value)
    monkeypatch.setattr(
        scale_ranks, "connect", lambda groups, _: [g.set_dp_ranks(g.start_connect(("", 0))) for g in groups]
    )
    monkeypatch.setattr(
        scale_ranks,
        "_start_actors",
        lambda size, stacks: [SimulatedRank(rank, size, stacks, {}) for rank in range(size)],
    )
    for name in ("start", "shutdown"):
        monkeypatch.setattr(scale_ranks.local_ray, name, lambda *_: None)


def test_every_rank_takes_part_in_a_rollout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process(monkeypatch)
    assert scale.main(["--ranks", "16", "--rounds", "2"]) == 0
    row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 16 |")]
    assert len(row) == 1 and all(float(cell) >= 0 for cell in row[0].strip("|").split("|"))


def test_a_rank_without_its_shard_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    monkeypatch.setattr(SimulatedRank, "connect", lambda *_: 0)
    original = SimulatedRank.train_rollout
    monkeypatch.setattr(SimulatedRank, "train_rollout", lambda rank, steps, tokens: original(rank, steps[:0], tokens))
    with pytest.raises(AssertionError, match="receives the shard"):
        scale_ranks.measure(16, 1)


def test_a_tensor_that_is_not_sent_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    monkeypatch.setattr(SimulatedRank, "send_weights", lambda rank, *_: list(rank.manifest())[1:])
    with pytest.raises(WeightSyncError, match="1 tensors are missing"):
        scale_ranks.measure(8, 1)


def test_the_benchmark_refuses_to_measure_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main([])
    assert "give --engines, --ranks or --rings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scale.main(["--ranks", "12"])
    assert "multiple of 8" in capsys.readouterr().err
