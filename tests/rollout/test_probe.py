"""Probe: comparison of log-probabilities of engines and trainer."""

from dataclasses import replace

import numpy as np
import pytest

from slime_like.data.routing import RoutingDifference
from slime_like.errors import ConsistencyError
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.pool import probe
from slime_like.types import F32, I32


def ids(*values: int) -> I32:
    return np.array(values, np.int32)


def column(*values: float) -> F32:
    return np.array(values, np.float32)


SCORES = probe.ProbeScores(
    version=3,
    token_ids=(ids(5, 6, 7), ids(8, 9)),
    logprobs=(column(-1, -2), column(-3)),
    continuations=(probe.Continuation(ids(5, 6, 1, 2), column(-4, -5), num_cached=1),),
)
# Two sequences, then the continuation; first tokens have no log-probability.
TRAINER_T = column(0, -1, -2, 0, -3, 0, -1, -4, -5)


def trainer(trainer_T: F32 = TRAINER_T, *engines: probe.ProbeScores) -> probe.TrainerScores:
    scores = probe.TrainerScores(engines or (SCORES,), max_tokens=100)
    scores.set_columns([trainer_T])
    return scores


def test_agreement_is_measured_without_first_tokens() -> None:
    (micro_batch,) = probe.TrainerScores([SCORES], max_tokens=9).rows
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert reduce_metrics(probe.check(SCORES, trainer(), 3, 1e-4)) == {
        "probe/logprob_abs_diff_max": 0,
        "probe/logprob_abs_diff_mean": 0,
        "probe/decode_logprob_abs_diff_max": 0,
        "probe/decode_logprob_abs_diff_mean": 0,
        "probe/prefix_cache_hit_rate": 0.5,
    }


def test_identical_sequences_of_several_engines_are_scored_once() -> None:
    second_engine = replace(SCORES, continuations=(replace(SCORES.continuations[0], token_ids=ids(5, 6, 1, 3)),))
    (micro_batch,) = probe.TrainerScores([SCORES, SCORES, second_engine], max_tokens=13).rows
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 5, 9, 13]
    report = trainer(np.concatenate([TRAINER_T, column(0, -1, -4, -9)]), SCORES, second_engine)
    probe.check(SCORES, report, 3, 1e-4)
    with pytest.raises(ConsistencyError, match=r"\|log-probability difference\| 4 over 2 tokens \(continuations: 1"):
        probe.check(second_engine, report, 3, 1e-4)


@pytest.mark.parametrize(("max_tokens", "ends"), [(8, [[0, 3, 5], [0, 4]]), (3, [[0, 3], [0, 2], [0, 4]])])
def test_sequences_are_packed_into_rows_of_max_tokens(max_tokens: int, ends: list[list[int]]) -> None:
    scores = probe.TrainerScores([SCORES], max_tokens)
    assert [micro_batch.cu_seqlens.tolist() for micro_batch in scores.rows] == ends
    cuts = np.cumsum([end[-1] for end in ends])[:-1]
    scores.set_columns(np.split(TRAINER_T, cuts))
    probe.check(SCORES, scores, 3, 1e-4)


@pytest.mark.parametrize("wrong", [TRAINER_T + 1e-3, np.full_like(TRAINER_T, np.nan)])
def test_disagreement_ends_the_run(wrong: F32) -> None:
    with pytest.raises(ConsistencyError, match=r"after the push of version 3 .* weights.probe_tolerance=0.0001"):
        probe.check(SCORES, trainer(wrong), 3, 1e-4)


@pytest.mark.parametrize("engines", [column(-4, -5.5), column(-4, np.nan)])
def test_a_differing_continuation_names_stale_kv_cache(engines: F32) -> None:
    scores = replace(SCORES, continuations=(replace(SCORES.continuations[0], logprobs=engines),))
    with pytest.raises(ConsistencyError, match=r"sampled after 2 prefix tokens, 1 of them cached.* older weights"):
        probe.check(scores, trainer(), 3, 0.15)


def test_a_tolerance_of_zero_compares_every_bit() -> None:
    probe.check(SCORES, trainer(), 3, 0.0)
    scores = TRAINER_T.copy()
    scores[2] = np.nextafter(scores[2], np.float32(0))
    with pytest.raises(ConsistencyError, match=r"weights.probe_tolerance=0\."):
        probe.check(SCORES, trainer(scores), 3, 0.0)


def test_a_wrong_weight_version_ends_the_run() -> None:
    with pytest.raises(ConsistencyError, match="serves weights of version 3 after the push of version 4"):
        probe.check(SCORES, trainer(), 4, 1e-4)


def test_differences_by_layer_kind_are_reported_without_a_check() -> None:
    scores = TRAINER_T + column(0, 0.25, 0, 0, -0.5, 0, 9, 9, 9)
    metrics = probe.layer_metrics(SCORES, trainer(scores), "gdn")
    assert [metric.name for metric in metrics] == ["probe/logprob_abs_diff_max/gdn", "probe/logprob_abs_diff_mean/gdn"]
    assert reduce_metrics(metrics) == {metrics[0].name: 0.5, metrics[1].name: 0.25}


def test_experts_are_replayed_per_engine_and_compared() -> None:
    first = np.array([[[1, 2]], [[3, 4]]], np.uint8)
    scores = replace(SCORES, experts=(first, first[:1]), continuations=())
    swapped = replace(scores, experts=(first[::-1], first[:1]))
    (rows,) = probe.TrainerScores([scores, swapped], max_tokens=100).rows
    assert rows.cu_seqlens.tolist() == [0, 3, 5, 8]  # the second sequence is the same for both engines
    np.testing.assert_array_equal(rows.extras["routed_experts"][:, 0, 0], [1, 3, 0, 1, 0, 3, 1, 0])
    (rows,) = probe.TrainerScores([scores.without_experts(), swapped.without_experts()], max_tokens=100).rows
    assert rows.cu_seqlens.tolist() == [0, 3, 5] and not rows.extras


def test_experts_that_are_not_nearly_tied_end_the_run() -> None:
    tied = RoutingDifference(share=0.01, max_share=0.02, max_gap=1e-5)
    assert reduce_metrics(probe.check_experts(tied, 3, 1e-4)) == {
        "probe/routed_experts_differ": 0.01,
        "probe/routed_experts_differ_max": 0.02,
        "probe/routed_experts_gap_max": 1e-5,
    }
    for gap in (0.3, float("nan")):
        with pytest.raises(
            ConsistencyError, match=r"push of version 3 .* different experts for 1\.00% .*probe_tolerance=0.0001"
        ):
            probe.check_experts(replace(tied, max_gap=gap), 3, 1e-4)
