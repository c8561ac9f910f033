import numpy as np
import pytest

from slime_like.errors import ConsistencyError
from slime_like.metrics.types import Max, reduce_metrics
from slime_like.rollout import probe

SCORES = probe.ProbeScores(
    version=3,
    token_ids=(np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)),
    logprobs=(np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)),
)
TRAINER_T = np.array([0.0, -1.0, -2.0, 0.0, -3.0], np.float32)


def test_agreement_is_measured_without_first_tokens() -> None:
    rows = probe.to_rows(SCORES)
    assert rows.cu_seqlens.tolist() == [0, 3, 5]
    metrics = probe.check(SCORES, TRAINER_T, 3, 1e-4)
    assert Max("probe/logprob_abs_diff_max", 0.0) in metrics


@pytest.mark.parametrize("wrong", [TRAINER_T + 1e-3, np.full_like(TRAINER_T, np.nan)])
def test_disagreement_ends_the_run(wrong: np.ndarray) -> None:
    with pytest.raises(ConsistencyError, match=r"after the push of version 3 .* weights.probe_tolerance is 0.0001"):
        probe.check(SCORES, wrong.astype(np.float32), 3, 1e-4)


def test_a_gate_of_zero_sees_the_last_bit() -> None:
    probe.check(SCORES, TRAINER_T, 3, 0.0)
    off = TRAINER_T.copy()
    off[2] = np.nextafter(off[2], np.float32(0))
    with pytest.raises(ConsistencyError, match=r"weights.probe_tolerance is 0\."):
        probe.check(SCORES, off, 3, 0.0)


def test_another_version_ends_the_run() -> None:
    with pytest.raises(ConsistencyError, match="serves weights of version 3 after the push of version 4"):
        probe.check(SCORES, TRAINER_T, 4, 1e-4)


def test_what_is_left_with_one_kind_of_layer_exact_is_reported_and_gates_nothing() -> None:
    off = TRAINER_T + np.array([0, 0.25, 0, 0, -0.5], np.float32)
    left = probe.by_kind(SCORES, off, "gdn")
    assert [metric.name for metric in left] == ["probe/logprob_abs_diff_max/gdn", "probe/logprob_abs_diff_mean/gdn"]
    assert reduce_metrics(left) == {left[0].name: 0.5, left[1].name: 0.25}
