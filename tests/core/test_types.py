"""Samples, spans and metrics."""

import dataclasses

import numpy as np
import pytest

from slime_like.metrics.types import Last, Max, Mean, Min, Sum, reduce_metrics
from slime_like.types import Prompt, Sample, SampleGroup, Source, Span, Status


def sample(spans: tuple[Span, ...], length: int = 7) -> Sample:
    return Sample(0, 0, 0, 0, np.zeros(length, np.int32), np.zeros(length, np.float32), spans, Status.COMPLETED)


def test_spans_give_versions_and_lengths() -> None:
    two_turns = sample((Span(0, 3, Source.PROMPT), Span(3, 5, Source.MODEL, 7), Span(5, 7, Source.MODEL, 6)))
    assert two_turns.versions == (6, 7)
    assert two_turns.num_prompt_tokens == 3
    assert two_turns.num_response_tokens == 4
    group = SampleGroup(0, Prompt(0, np.zeros(3, np.int32), "", None, None), (two_turns,))
    assert group.oldest_version == 6


@pytest.mark.parametrize(
    "spans", [(Span(0, 3, Source.PROMPT),), (Span(0, 3, Source.PROMPT), Span(4, 7, Source.MODEL, 0))]
)
def test_spans_that_leave_tokens_out_are_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(AssertionError):
        sample(spans)


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Span(0, 1, Source.PROMPT).start = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_metrics_reduce_by_their_own_kind() -> None:
    reduced = reduce_metrics(
        [
            Mean("a", 3.0, 2.0),
            Mean("a", 6.0, 1.0),
            Sum("b", 1),
            Sum("b", 2),
            Max("c", 1),
            Max("c", 5),
            Min("d", 1),
            Min("d", 5),
            Last("e", 1),
            Last("e", 9),
        ]
    )
    assert reduced == {"a": 4.0, "b": 3.0, "c": 5.0, "d": 1.0, "e": 9.0}


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is reported as"):
        reduce_metrics([Mean("a", 1), Max("a", 2)])
