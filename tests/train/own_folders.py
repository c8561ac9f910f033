"""Rank functions of test_own_folders: two ranks, each of which has a folder of its own in place of the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import CheckpointError
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import digest, train
from tests.train.ranks import RankWorld
from tests.train.saving import small_files

SEPARATE = ("", "10.0.0.2")


def actor_with_own_folder(world: RankWorld, shared: Shared, layout: Layout) -> Any:
    """Return a rank that does not expect its peer to see its folder."""
    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    actor.rank_info = replace(actor.rank_info, separate_nodes=SEPARATE)
    return actor


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def save_load_and_export(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Save, export and load; return the files of this rank's folder after the save and at the end."""
    folder = shared.scratch / f"node{world.rank}"
    actor = actor_with_own_folder(world, shared, layout)
    train(actor, layout, 1)
    saved_digest = digest(actor)
    actor.begin_save(folder, 1)
    train(actor, layout, 2)
    actor.finish_save(wait=True)
    after_save = files_of(folder)
    actor.export_hf(folder / "hf")
    resumed = actor_with_own_folder(world, shared, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_like.train.megatron.model_io.node_files.CHUNK_BYTES", 1000)  # several chunks of a file
        resumed.load(folder, 1)
    resumed_digest = digest(resumed)
    train(resumed, layout, 2)
    return {
        "after save": after_save,
        "loaded": resumed_digest == saved_digest,
        "continues": digest(resumed) == digest(actor),
        "files": files_of(folder),
    }


def full_disk_of_rank_zero(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Send files to a full disk, then to one with space. Return the error, and the files of this rank's folder."""
    from slime_like.train.megatron.model_io.node_files import gather_files

    info = actor_with_own_folder(world, shared, layout).rank_info
    folder = shared.scratch / f"full{world.rank}"
    folder.mkdir(parents=True)
    names = [[], ["large", "small", "empty"]]
    contents = {"large": bytes(range(200)) * 500, "small": b"small", "empty": b""}
    if world.rank == 1:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    message = "no error"
    try:
        with pytest.MonkeyPatch.context() as patch, small_files(20_000):
            patch.setattr("slime_like.train.megatron.model_io.node_files.CHUNK_BYTES", 15_000)
            gather_files(folder, names, info)
    except CheckpointError as error:
        message = str(error)
    files = files_of(folder)
    gather_files(folder, names, info)
    equal = world.rank == 1 or all((folder / name).read_bytes() == content for name, content in contents.items())
    return {"error": message, "kept": files, "equal": equal, "exists": folder.exists()}


def missing_checkpoint(world: RankWorld, shared: Shared, layout: Layout) -> str:
    """Return the error of a load without a checkpoint."""
    try:
        actor_with_own_folder(world, shared, layout).load(shared.scratch / f"none{world.rank}", 3)
    except CheckpointError as error:
        return str(error)
    return "no error"
