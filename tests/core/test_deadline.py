"""Deadlines: the message of an expired one, and the factor that scales all of them."""

import pickle

import pytest

from slime_like.errors import DeadlineExceeded
from slime_like.util.deadline import FACTOR_VARIABLE, Deadline


def test_expiry_names_the_waiting_and_the_awaited_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FACTOR_VARIABLE, raising=False)
    deadline = Deadline("driver", "push", 5.0, started=-1e9)
    with pytest.raises(DeadlineExceeded, match=r"driver waited .* for engine 0 in phase 'push' \(limit 5 s"):
        deadline.remaining("engine 0")


def test_one_factor_scales_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "3")
    assert Deadline("a", "b", 10.0).limit == 30.0


@pytest.mark.parametrize("text", ["0", "-1", "fast"])
def test_a_factor_that_is_not_a_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, text)
    with pytest.raises(ValueError, match=FACTOR_VARIABLE):
        _ = Deadline("a", "b", 1.0).limit


def test_errors_pickle_with_their_message() -> None:
    error = Deadline("driver", "step", 1.0).exceeded("trainer rank 1")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is DeadlineExceeded
    assert str(copy) == str(error)
