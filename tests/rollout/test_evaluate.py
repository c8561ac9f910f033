"""Evaluation metrics: unbiased pass@k, lengths and truncation; per-dataset settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.cluster.run.eval_files import answers_path, write_answers
from slime_like.config.rules.eval_overrides import check_overrides
from slime_like.config.schema.rollout import EvalConfig, RewardConfig
from slime_like.data.heldout import EvalSet, eval_sets
from slime_like.errors import ConfigError
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import Sum, reduce_metrics
from slime_like.rollout.generate.evaluate import (
    ManagerEvaluation,
    PromptResult,
    eval_answers,
    eval_metrics,
    mean_pass_at_k,
    merge_evaluations,
    pass_at_k,
    prompt_result,
)
from slime_like.types import Reward, SampleGroup, Status
from tests.hypothesis_examples import num_examples
from tests.reward.scored import group


@settings(max_examples=num_examples(200), deadline=None)
@given(st.integers(1, 400), st.data())
def test_pass_at_k_equals_the_exact_formula(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - right, k), comb(n, k))
    assert pass_at_k(n, right, k) == pytest.approx(float(exact), abs=1e-12)


@settings(max_examples=num_examples(50), deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = [any(draw) for draw in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_a_mean_over_prompts_for_powers_of_two() -> None:
    assert mean_pass_at_k([[True, False, False, False], [False] * 4]) == {1: 0.125, 2: 0.25, 4: 0.5}
    assert mean_pass_at_k([[True] * 3, [False] * 7]) == {1: 0.5, 2: 0.5}
    assert mean_pass_at_k([[True], [False, True]]) == mean_pass_at_k([]) == {}


def scored(rewards: Sequence[Reward], statuses: Sequence[Status]) -> SampleGroup:
    unscored = group(*("x" for _ in rewards))
    samples = [replace(s, reward=r, status=t) for s, r, t in zip(unscored.samples, rewards, statuses, strict=True)]
    return replace(unscored, samples=tuple(samples))


def results(*groups: SampleGroup) -> list[PromptResult]:
    return [prompt_result("aime", replace(g, group_id=i), with_answers=True) for i, g in enumerate(groups)]


def test_an_evaluation_by_several_managers_equals_that_by_one() -> None:
    """The managers have different numbers of prompts and samples, so that means of their means would be wrong."""
    rewards = ([0.0, 1.0, 1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0, 0.0])
    groups = [scored([Reward(r, r) for r in row], [Status.COMPLETED] * len(row)) for row in rewards]
    groups[1] = replace(groups[1], samples=tuple(replace(s, status=Status.TRUNCATED) for s in groups[1].samples))
    prompts = results(*groups)
    single_manager = merge_evaluations([ManagerEvaluation({"aime": tuple(prompts)}, (Sum("reward/calls", 13.0),))])
    parts = [
        ManagerEvaluation({"aime": tuple(prompts[index::2])}, (Sum("reward/calls", calls),))
        for index, calls in ((0, 9.0), (1, 4.0))
    ]
    merged = merge_evaluations(parts)
    assert reduce_metrics(merged.metrics) == reduce_metrics(single_manager.metrics)
    assert merged.answers == single_manager.answers and len(single_manager.answers) == 13
    assert reduce_metrics(merged.metrics)["eval/aime"] == pytest.approx(7 / 13)
    with_idle_manager = merge_evaluations([*parts[:1], ManagerEvaluation({"aime": ()}, ())])
    assert reduce_metrics(with_idle_manager.metrics)["eval/aime"] == pytest.approx(4 / 9)


def test_metrics_have_slimes_names_and_are_in_the_dictionary() -> None:
    right, wrong = Reward(1.0, 1.0), Reward(-1.0, 0.0)
    done, cut = Status.COMPLETED, Status.TRUNCATED
    metrics = reduce_metrics(
        eval_metrics("aime", results(scored([right, wrong], [done, cut]), scored([wrong, wrong], [done, done])))
    )
    assert unknown_names(metrics) == []
    assert metrics == {
        "eval/aime": 0.25,
        "eval/aime-truncated_ratio": 0.25,
        "eval/aime-pass@1": 0.25,
        "eval/aime-pass@2": 0.5,
        **{f"eval/aime/response_len/{statistic}": 1.0 for statistic in ("mean", "median", "max", "min")},
    }


def test_without_an_accuracy_the_score_is_reported() -> None:
    metrics = reduce_metrics(eval_metrics("qa", results(scored([Reward(0.25), Reward(1.0)], [Status.COMPLETED] * 2))))
    assert (metrics["eval/qa"], metrics["eval/qa-pass@1"], metrics["eval/qa-pass@2"]) == (0.625, 0.5, 1.0)


SETS = EvalConfig(
    datasets={"aime": "a.jsonl", "gpqa": "g.parquet@[0:9]"},
    n_samples_per_prompt=2,
    temperature=0.6,
    overrides={"aime": {"n_samples_per_prompt": 16, "max_response_len": 99}, "gpqa": {"rm_type": "gpqa", "top_k": 20}},
)


def test_dataset_settings_override_the_common_ones() -> None:
    check_overrides(SETS, RewardConfig())
    assert eval_sets(SETS) == (
        EvalSet("aime", "a.jsonl", 16, 0.6, 1.0, -1, 99),
        EvalSet("gpqa", "g.parquet@[0:9]", 2, 0.6, 1.0, 20, None, "gpqa"),
    )


@pytest.mark.parametrize(
    ("overrides", "reward", "message"),
    [
        ({"aim": {}}, {}, r"evaluation.overrides.aim: there is no such dataset: did you mean 'aime'\?"),
        ({"aime": {"temprature": 1}}, {}, r"overrides.aime.temprature is unknown: did you mean 'temperature'\?"),
        ({"aime": {"n_samples_per_prompt": 1.5}}, {}, r"n_samples_per_prompt=1.5 must be a whole number"),
        ({"aime": {"n_samples_per_prompt": True}}, {}, r"n_samples_per_prompt=True must be a whole number"),
        ({"aime": {"top_p": 1.5}}, {}, r"top_p=1.5 must lie in \[0, 1\]"),
        ({"aime": {"apply_chat_template": "yes"}}, {}, r"apply_chat_template='yes' must be true or false"),
        ({"aime": {"input_key": ""}}, {}, r"input_key='' must be a string"),
        ({"aime": 3}, {}, r"overrides.aime=3 must be a mapping such as"),
        ({"aime": {"rm_type": "mth"}}, {}, r"aime.rm_type='mth' is unknown: did you mean 'math'\?"),
        ({"aime": {"rm_type": "math"}}, {"name": "m:f"}, r"rm_type='math' has no effect with reward.name='m:f'"),
        ({"aime": {"rm_type": "math"}}, {"weights": {"f1": 1.0}}, r"has no effect with reward.weights without rm_type"),
    ],
)
def test_an_invalid_dataset_setting_is_named(
    overrides: dict[str, object], reward: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_overrides(replace(SETS, overrides=overrides), RewardConfig(**reward))  # pyright: ignore[reportArgumentType]


def test_answers_are_written_as_a_table(tmp_path: Path) -> None:
    import pandas as pd  # takes a second, in each process that collects this file

    path = answers_path(tmp_path, 10)
    answers = eval_answers("sums", group("4", "\ud800 \x1b[31m", label="4"))
    write_answers(path, 10, answers)
    table = pd.read_json(tmp_path / "eval" / "step_0000010.jsonl", lines=True, dtype={"label": str})
    assert table.step.tolist() == [10, 10] and table.dataset.unique().tolist() == ["sums"]
    assert table.response.tolist() == ["4", "? \x1b[31m"] and table.label.tolist() == ["4", "4"]
    assert table.score.isna().all(), "these samples were not scored"
    write_answers(path, 10, answers[:1])
    assert len(pd.read_json(path, lines=True)) == 1, "a repeated evaluation replaces the first"
