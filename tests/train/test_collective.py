"""Actions of rank 0, without ranks: what rank 0 raises, and what it tells the other ranks before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform import collective


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
