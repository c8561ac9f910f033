"""Errors of one rank: the message that the other ranks get before the rank raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform import collective
from tests.train.jobs import RankJob, Results
from tests.train.unreadable import GLOO_ERROR

JOBS = {
    1: [
        RankJob("unreadable checkpoint", "tests.train.unreadable:read_without_permission"),
        RankJob("errors of a load", "tests.train.unreadable:errors_of_a_load"),
    ]
}


def fail_with(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (CheckpointError("damaged"), CheckpointError, "damaged"),
        (OSError(28, "No space left on device", "/out"), CheckpointError, "/out: No space left on device"),
        (KeyError("dtype"), KeyError, "rank 0 failed: KeyError: 'dtype'"),
    ],
)
def test_the_other_ranks_learn_of_every_error(
    error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str | None] = []
    monkeypatch.setattr(collective.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(collective.dist, "broadcast_object_list", messages.extend)
    with pytest.raises(kind):
        collective.on_rank_zero(fail_with(error))
    assert len(messages) == 1 and messages[0] is not None and messages[0].startswith(message)


@pytest.mark.ranks
def test_a_rank_that_cannot_enter_the_checkpoint_tells_the_others(results: Results) -> None:
    ((message, broadcasts),) = results["unreadable checkpoint"]
    assert message.startswith("/c/iter_0000001: cannot be read (Permission denied)"), message
    assert len(broadcasts) == 1 and broadcasts[0] is not None


@pytest.mark.ranks
def test_a_lost_peer_is_not_reported_as_a_damaged_checkpoint(results: Results) -> None:
    ((lost_peer, damaged_file),) = results["errors of a load"]
    assert lost_peer == f"RuntimeError: {GLOO_ERROR}"
    assert damaged_file == (
        "CheckpointError: /c/iter_0000001: damaged (RuntimeError: PytorchStreamReader failed reading zip archive)"
    )
