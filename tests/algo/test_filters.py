"""Group filters."""

from __future__ import annotations

from slime_like.algo.filters import completed, nonzero_std
from slime_like.types import Status
from tests.algo.samples import SampleShape, groups_of


def group(*samples: tuple[float, Status]):
    return groups_of([[SampleShape((1, 2, 0, 0), reward, status) for reward, status in samples]])[0]


def test_nonzero_std_drops_groups_of_equal_rewards() -> None:
    assert nonzero_std(group((0.0, Status.COMPLETED), (1.0, Status.TRUNCATED))) is None
    assert nonzero_std(group((1.0, Status.COMPLETED), (1.0, Status.COMPLETED))) == "zero_std"


def test_nonzero_std_ignores_failures() -> None:
    assert nonzero_std(group((1.0, Status.COMPLETED), (1.0, Status.COMPLETED), (0.0, Status.FAILED))) == "zero_std"


def test_completed_names_the_status() -> None:
    assert completed(group((1.0, Status.COMPLETED), (0.0, Status.COMPLETED))) is None
    assert completed(group((1.0, Status.COMPLETED), (0.0, Status.TRUNCATED))) == "truncated"
