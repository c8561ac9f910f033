"""Rank functions of test_collective: a checkpoint folder that one rank may not enter, and errors during a load."""

from __future__ import annotations

from pathlib import Path

from slime_like.errors import CheckpointError
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared
from tests.train.ranks import RankWorld


def read_without_permission(world: RankWorld, shared: Shared) -> tuple[str, list[str | None]]:
    """Return the error of a read, and the errors that this rank sent to the others."""
    from slime_like.train.megatron.model_io import damage  # imports megatron, which a rank adapts first

    own_errors: list[str | None] = []

    def gather(errors: list[str | None], error: str | None) -> None:
        own_errors.append(error)
        errors[0] = error

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    with (
        replace_attribute(damage.dist, "get_world_size", lambda: 1),
        replace_attribute(damage.dist, "all_gather_object", gather),
        replace_attribute(damage, "read_record", refuse),
    ):
        try:
            damage.read_verified_manifest(Path("/c/iter_0000001"), verify=True)
        except CheckpointError as error:
            return str(error), own_errors
    return "no error", own_errors


GLOO_ERROR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection closed by peer [10.0.0.2]:56465"


def errors_of_a_load(world: RankWorld, shared: Shared) -> list[str]:
    """Return the errors of a load in which a peer is lost, and of one that reads a damaged file."""
    from slime_like.train.megatron.model_io.damage import convert_damage

    out: list[str] = []
    for text in (GLOO_ERROR, "PytorchStreamReader failed reading zip archive"):
        try:
            with convert_damage(lambda reason: f"/c/iter_0000001: damaged ({reason})"):
                raise RuntimeError(text)
        except RuntimeError as error:  # CheckpointError is one too
            out.append(f"{type(error).__name__}: {error}")
    return out
