"""Critic and teacher: the same values, losses and weights in every layout, equal to transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.lifecycle import batch
from tests.train.roles import STEPS, TrainedColumns, head_weight

pytestmark = pytest.mark.ranks

TEMPERATURE = 0.7
LAYOUTS = {"tp2 sp": Layout(**SP), "pp2": Layout(pp=2), "dp2": Layout(dp=2), "cp2": Layout(cp=2)}
ROLES = "tests.train.roles"


def jobs(name: str, layout: Layout) -> list[RankJob]:
    return [
        RankJob(f"ppo {name}", f"{ROLES}:ppo", (layout,)),
        RankJob(f"teacher's ranks {name}", f"{ROLES}:own_teacher", (layout,)),
        RankJob(f"teacher swapped {name}", f"{ROLES}:swapped_teacher", (layout,)),
        RankJob(f"other shape {name}", f"{ROLES}:teacher_of_another_shape", (layout,)),
        RankJob(f"new critics {name}", f"{ROLES}:new_critics", (layout,)),
    ]


JOBS = {
    1: [*jobs("one rank", Layout()), RankJob("critic resumes", f"{ROLES}:critic_resumes", (Layout(),))],
    2: [
        *(job for name, layout in LAYOUTS.items() for job in jobs(name, layout)),
        RankJob("ppo vpp2", f"{ROLES}:ppo", (Layout(pp=2, vpp=2),)),
        RankJob("value gradient summed twice", f"{ROLES}:faulty_ppo", (LAYOUTS["tp2 sp"],)),
        RankJob("critic's warm-up", f"{ROLES}:warmup", (LAYOUTS["dp2"],)),
    ],
}
EXPECTED = {
    "train/value_loss",
    "train/value_clipfrac",
    "train/values",
    "train/returns",
    "train/explained_variance",
    "train/critic_grad_norm",
    "train/critic_lr",
    "train/pg_loss",
    "train/grad_norm",
    "perf/values_time",
    "perf/critic_train_time",
}


def columns_of(results: Results, name: str) -> TrainedColumns:
    """Return the ranks' results with the metrics of all ranks, each of which exactly one rank reports."""
    ranks: list[TrainedColumns] = results[name]
    metrics: list[dict[str, float]] = []
    for per_rank in zip(*(rank.metrics for rank in ranks), strict=True):
        names = [metric for metrics_of_rank in per_rank for metric in metrics_of_rank]
        assert len(names) == len(set(names)), "a metric was reported twice"
        metrics.append({metric: value for metrics_of_rank in per_rank for metric, value in metrics_of_rank.items()})
    return TrainedColumns(metrics, ranks[0].before, ranks[0].after, ranks[0].advantages)


def close(actual: list[list[Any]], expected: list[list[Any]], bound: float = 1e-5) -> bool:
    pairs = [(a, b) for x, y in zip(actual, expected, strict=True) for a, b in zip(x, y, strict=True)]
    return bool(pairs) and max(float(np.abs(a - b).max()) for a, b in pairs) <= bound


def compare(actual: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        if name.startswith("train/"):
            assert actual[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", [*LAYOUTS, "vpp2"])
def test_actor_and_critic_are_the_same_run_in_every_layout(name: str, results: Results) -> None:
    single, split = columns_of(results, "ppo one rank"), columns_of(results, f"ppo {name}")
    assert split.metrics[0].keys() >= EXPECTED
    for split_metrics, single_metrics in zip(split.metrics, single.metrics, strict=True):
        compare(split_metrics, single_metrics)
    assert close(split.before, single.before)
    assert close(split.after, single.after, 2e-4)
    assert not close(single.before, single.after, 0.01)  # training changes the values
    assert sorted(split.advantages) == sorted(single.advantages) == [0, 101, 110], "only existing samples are returned"
    for sample_id, advantages in single.advantages.items():
        np.testing.assert_allclose(split.advantages[sample_id], advantages, rtol=1e-3, atol=1e-3)
        assert len(np.unique(advantages[1:])) > 1, "GAE gives tokens of one sample different advantages"


def test_values_equal_transformers(results: Results, models: dict[str, Path]) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(models["untied"], dtype=torch.float32)
    actual = columns_of(results, "ppo one rank").before
    for step, rows in ((k, r) for k in range(STEPS) for r in enumerate(batch(k))):
        index, row = rows
        expected = np.zeros(len(row.token_ids), np.float32)
        for start, stop in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(row.token_ids[start:stop].astype(np.int64))[None]
            with torch.no_grad():
                values = model(input_ids=ids).last_hidden_state[0] @ head_weight()[0] + 0.3
            expected[start + 1 : stop] = values[:-1].numpy()
        expected[row.loss_weight == 0] = 0
        np.testing.assert_allclose(actual[step][index], expected, atol=2e-5)


def test_a_gradient_that_is_summed_twice_is_detected(results: Results) -> None:
    single, faulty = columns_of(results, "ppo one rank"), columns_of(results, "value gradient summed twice")
    assert close(faulty.before, single.before)
    assert not close(faulty.after, single.after, 1e-3)
    key = "train/critic_grad_norm"
    assert faulty.metrics[0][key] != pytest.approx(single.metrics[0][key], rel=1e-2)


def test_the_value_loss_falls(results: Results) -> None:
    first, second = columns_of(results, "ppo one rank").metrics
    assert second["train/value_loss"] < first["train/value_loss"]


def test_a_new_value_head_returns_zero(results: Results) -> None:
    for name in ("one rank", *LAYOUTS):
        values = [value for rank in results[f"new critics {name}"] for value in rank]
        assert values
        assert set(values) == {0.0}


def test_the_actor_is_unchanged_while_the_critic_warms_up(results: Results) -> None:
    ranks = results["critic's warm-up"]
    assert all(rank["actor unchanged"] and rank["version"] == 1 for rank in ranks)
    metrics = {name: value for rank in ranks for name, value in rank["metrics"].items()}
    assert metrics["train/value_loss"] > 0
    assert "train/grad_norm" not in metrics


def test_a_critics_checkpoint_can_be_resumed_and_loaded(results: Results) -> None:
    (result,) = results["critic resumes"]
    assert close(result["resumed"], result["expected"], 0.0)
    assert close(result["loaded"], result["expected"], 0.0)
    assert close(result["loaded by a plain optimizer"], result["expected"], 0.0)
    assert result["version"] == 2
    assert result["report"]["train/value_loss"] > 0


@pytest.mark.parametrize("name", ["actor as critic.load", "actor resumed as critic"])
def test_an_actors_checkpoint_has_no_value_head(name: str, results: Results) -> None:
    (errors,) = results["critic resumes"]
    assert errors[name].startswith("CheckpointError: ")
    assert "iter_0000001: has no value head" in errors[name]
    assert "critic.load" in errors[name]


@pytest.mark.parametrize("kind", ["teacher's ranks", "teacher swapped"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_distillation_is_the_same_run_in_every_layout(kind: str, name: str, results: Results) -> None:
    single, split = columns_of(results, "teacher's ranks one rank"), columns_of(results, f"{kind} {name}")
    for split_metrics, single_metrics in zip(split.metrics, single.metrics, strict=True):
        compare(split_metrics, single_metrics)
    first, second = single.metrics
    assert first["train/teacher_kl"] == pytest.approx(0, abs=1e-6)  # the student starts as a copy
    assert abs(second["train/teacher_kl"]) > 1e-3


@pytest.mark.parametrize("name", ["one rank", *LAYOUTS])
def test_a_teacher_of_another_family_equals_transformers(name: str, results: Results, models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    logprobs = results[f"other shape {name}"][0]
    for k in range(STEPS):
        for row, column in zip(batch(k), logprobs[k], strict=True):
            expected = np.zeros(len(row.token_ids), np.float32)
            for start, stop in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
                ids = torch.from_numpy(row.token_ids[start:stop].astype(np.int64))[None]
                with torch.no_grad():
                    table = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / TEMPERATURE, -1)
                expected[start + 1 : stop] = table.gather(1, ids[0, 1:, None])[:, 0].numpy()
            expected[row.loss_weight == 0] = 0
            np.testing.assert_allclose(column, expected, atol=2e-5)
