"""The gate on samples: no optimizer step is taken on tokens that the trainer's weights would not have sampled."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from slime_like.metrics.dictionary import unknown
from tests.train.drift import TOLERANCE
from tests.train.jobs import SP, Job, Results

pytestmark = pytest.mark.ranks

GATE = "tests.train.drift:gate"
RUNS: dict[str, tuple[Layout, int]] = {
    "gate": (Layout(), 1),
    "gate of two steps": (Layout(), 2),
    "gate dp2": (Layout(dp=2), 1),
    "gate pp2": (Layout(pp=2), 1),
    "gate cp2, two steps": (Layout(cp=2), 2),
    "gate tp2": (Layout(**SP), 1),
}
JOBS = {size: [Job(name, GATE, run) for name, run in RUNS.items() if run[0].world_size == size] for size in (1, 2)}
DRIFT = "train/train_rollout_logprob_abs_diff"


def reported(results: Results, name: str, what: str) -> dict[str, float]:
    (found,) = [rank[what] for rank in results[name] if rank[what]]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_what_the_trainers_weights_sampled_is_trained_on(name: str, results: Results) -> None:
    found = reported(results, name, "healthy")
    assert 0 <= found[DRIFT] <= found[f"{DRIFT}_p99"] <= found[f"{DRIFT}_max"] <= TOLERANCE / 10
    assert found["train/off_policy_token_ratio"] == 0 and f"{DRIFT}_mixed" not in found
    assert {f"{DRIFT}_max/{kind}" for kind in ("attention", "mlp", "all")} <= found.keys()
    assert max(found[f"{DRIFT}_max/{kind}"] for kind in ("attention", "mlp", "all")) <= TOLERANCE / 10
    assert unknown(found) == []


@pytest.mark.parametrize("fault", ["older weights", "shifted", "temperature", "not a number", "reference"])
@pytest.mark.parametrize("name", RUNS)
def test_no_step_is_taken_on_other_samples(name: str, fault: str, results: Results) -> None:
    messages: set[Any] = set()
    for rank in results[name]:
        message, untouched = rank[fault]
        messages.add(message)
        assert "engine and trainer, which holds version" in message, message
        assert untouched or fault == "reference", "weights or version changed"  # the swap itself left a tensor behind
    assert len(messages) == 1, "every rank says the same"
    (message,) = messages
    tolerance = "inf" if fault == "not a number" else "0.0001"
    assert f"weights.sample_tolerance is {tolerance}. No optimizer step was taken" in message
    if fault in ("shifted", "not a number"):
        assert "largest in samples 30" in message, "the last micro-batch's"


@pytest.mark.parametrize("name", RUNS)
def test_samples_begun_by_other_weights_are_reported_apart(name: str, results: Results) -> None:
    found = reported(results, name, "mixed")
    assert found[f"{DRIFT}_max"] <= TOLERANCE / 10
    assert found[f"{DRIFT}_mixed"] == pytest.approx(1, abs=1e-4) == found[f"{DRIFT}_mixed_max"]
    assert found[f"{DRIFT}_stale"] == pytest.approx(1, abs=1e-4)
    assert 0 < found["train/off_policy_token_ratio"] < 0.5
    assert unknown(found) == []
