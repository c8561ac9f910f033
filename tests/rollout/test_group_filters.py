"""Group filters: reasons as metrics, means before filtering, and errors for invalid return values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import UserCodeError
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.collect.group_filters import MAX_REASONS, GroupFilters
from slime_like.types import SampleGroup, Status
from tests.rollout.scored import group

HERE = "tests.rollout.test_group_filters"


def by_prompt(candidate: SampleGroup) -> object:
    """Return the verdict encoded in the prompt's label."""
    match candidate.prompt.label:
        case None:
            return None
        case "true":
            return True
        case "raise":
            raise KeyError("no such column")
        case reason:
            return reason


def filters(*names: str) -> GroupFilters:
    return GroupFilters(RolloutConfig(filters=list(names)))


def test_reasons_are_metrics_and_are_later_reported_as_zero() -> None:
    group_filters = filters(f"{HERE}:by_prompt", "nonzero_std")
    verdicts = [group_filters.keep(group([0.0, 1.0], label=label)) for label in (None, "late", "odd/even", "late")]
    verdicts.append(group_filters.keep(group([1.0, 1.0])))
    assert verdicts == [True, False, False, False, False]
    prefix = f"rollout/dropped_groups/{HERE}:by_prompt"
    expected = {prefix: 3, f"{prefix}/late": 2, f"{prefix}/other": 1}
    nonzero = {"rollout/dropped_groups/nonzero_std": 1, "rollout/dropped_groups/nonzero_std/zero_std": 1}
    report = group_filters.report()
    assert "5 groups were generated" in report.summary
    assert f"{HERE}:by_prompt dropped 3 (late, other)" in report.summary
    values = reduce_metrics(report.metrics)
    assert {name: values[name] for name in expected | nonzero} == expected | nonzero
    assert not unknown_names(values)
    second_report = reduce_metrics(group_filters.report().metrics)
    assert second_report == dict.fromkeys(expected | nonzero, 0), "means without groups are omitted"


def test_means_are_taken_over_all_generated_groups() -> None:
    group_filters = filters("nonzero_std")
    assert [group_filters.keep(group(scores)) for scores in ([1.0, 1.0], [0.0, 1.0], [1.0, 1.0])] == [
        False,
        True,
        False,
    ]
    values = reduce_metrics(group_filters.report().metrics)
    assert values["rollout/generated/raw_reward"] == pytest.approx(5 / 6)
    assert values["rollout/generated/zero_std_ratio"] == pytest.approx(2 / 3)
    assert "rollout/generated/accuracy" not in values, "these rewards have no accuracy"


def test_failed_samples_enter_no_mean() -> None:
    group_filters, failed = filters(), group([1.0, 0.0])
    group_filters.keep(replace(failed, samples=(failed.samples[0], replace(failed.samples[1], status=Status.FAILED))))
    values = reduce_metrics(group_filters.report().metrics)
    assert values["rollout/generated/raw_reward"] == 1
    assert values["rollout/generated/zero_std_ratio"] == 1


def test_reasons_beyond_the_maximum_are_counted_together() -> None:
    group_filters = filters(f"{HERE}:by_prompt")
    for number in range(MAX_REASONS + 5):
        group_filters.keep(group([1.0], label=f"reason {number}"))
    values = reduce_metrics(group_filters.report().metrics)
    assert values[f"rollout/dropped_groups/{HERE}:by_prompt/other"] == 5
    assert len(values) == 1 + MAX_REASONS + 1 + 2


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (
            "true",
            r"by_prompt returned True \(bool\) for the group of prompt 7 \(train\): a filter returns None to keep",
        ),
        ("", r"returned '' \(str\)"),
        ("raise", r"rollout.filters=.*by_prompt raised KeyError: 'no such column' \(.*test_group_filters.py:\d+\)"),
    ],
)
def test_an_invalid_verdict_of_a_filter_is_named(label: str, words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        filters(f"{HERE}:by_prompt").keep(group([0.0, 1.0], label=label))


def test_means_of_several_managers_are_those_over_all_their_groups() -> None:
    groups = [group([1.0, 1.0]), group([0.0, 1.0]), group([0.0, 1.0, 0.0, 0.0])]
    single, parts = filters("nonzero_std"), [filters("nonzero_std"), filters("nonzero_std")]
    for index, candidate in enumerate(groups):
        assert single.keep(candidate) == parts[index > 0].keep(candidate)
    merged = reduce_metrics(metric for part in parts for metric in part.report().metrics)
    assert merged == pytest.approx(reduce_metrics(single.report().metrics))
