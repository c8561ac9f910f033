"""Errors of one rank, without ranks: the message that the other ranks get before the rank raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.errors import CheckpointError
from slime_like.train.megatron.model_io import damage
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


def test_a_rank_that_cannot_enter_the_checkpoint_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []

    def gather(errors: list[str | None], error: str | None) -> None:
        sent.append(error)
        errors[0] = error

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(damage.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(damage.dist, "all_gather_object", gather)
    monkeypatch.setattr(damage, "read_record", refuse)
    with pytest.raises(CheckpointError, match=r"^/c/iter_0000001: cannot be read \(Permission denied\)"):
        damage.read_verified_manifest(Path("/c/iter_0000001"), verify=True)
    assert len(sent) == 1
