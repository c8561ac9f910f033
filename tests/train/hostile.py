"""Rank functions of test_starting: all code that reads a checkpoint, on folders whose pickles would run code."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from slime_like.checkpoint.files import MANIFEST, megatron_folder
from slime_like.checkpoint.record import read_manifest, write_manifest
from slime_like.config.schema.algo import GrpoConfig, SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import SlimeLikeError
from tests.train.jobs import Shared, make_actor
from tests.train.ranks import RankWorld


class Touch:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)  # pyright: ignore[reportDeprecated]


def _instead_of_metadata(folder: Path, touch: Touch) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(touch))


def _within_metadata(folder: Path, touch: Touch) -> None:
    """Keep the rest of the metadata, so that the load could succeed."""
    _edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", touch))


def _object(folder: Path, touch: Touch) -> None:
    """Redirect the state that every load reads first to a separate file."""
    _redirect(folder, touch, "__9_9.distcp")


def _outside(folder: Path, touch: Touch) -> None:
    """Redirect the same state to a file of another folder."""
    _redirect(folder, touch, "../elsewhere.distcp")


def _common(folder: Path, touch: Touch) -> None:
    """Add ``common.pt``, which earlier versions of megatron-core wrote."""
    torch.save({"args": touch}, folder / "common.pt")


PLANTS: dict[str, Callable[[Path, Touch], None]] = {
    "in place of the metadata": _instead_of_metadata,
    "within the metadata": _within_metadata,
    "in an object": _object,
    "outside": _outside,
    "in common.pt": _common,
}


def _redirect(folder: Path, touch: Touch, name: str) -> None:
    data = io.BytesIO()
    torch.save([touch], data)
    (folder / name).write_bytes(data.getvalue())

    def point(metadata: Any) -> None:
        (index,) = [index for index in metadata.storage_data if "common_state" in index.fqn]
        metadata.storage_data[index].relative_path = name
        metadata.storage_data[index].offset, metadata.storage_data[index].length = 0, len(data.getvalue())

    _edit_metadata(folder, point)


def _edit_metadata(folder: Path, edit: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (our own file)
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def read_planted(world: RankWorld, shared: Shared, gpt: str, saved_by: str) -> dict[str, str]:
    """Return ``<path>, <plant>`` -> error of the load, prefixed by ``ran`` if the planted code ran."""
    from slime_like.train.megatron.model_io.convert import export_checkpoint
    from slime_like.train.megatron.model_io.load import load_weights

    models = shared.models
    actor = make_actor(world, models["tied"], Layout(), algo=SftConfig())

    def start(folder: Path) -> None:
        make_actor(world, models["untied"], Layout(), algo=SftConfig(), model={"megatron_checkpoint": str(folder)})

    def reference(folder: Path) -> None:
        algo = GrpoConfig(kl_loss_coef=0.1)
        make_actor(world, models["untied"], Layout(), algo=algo, model={"ref_checkpoint": str(folder)})

    def export(folder: Path) -> None:
        export_checkpoint(
            _within(folder), str(models["untied"]), shared.scratch / "hf", dtype="float32", max_bytes=2**30
        )

    any_paths: dict[str, Callable[[Path], object]] = {"start": start, "reference": reference, "export": export}
    own_paths: dict[str, Callable[[Path], object]] = {
        "resume": actor.load,
        "critic": lambda folder: load_weights(actor.state(), _within(folder)),
    }
    cases = [(path, action, plant, gpt) for path, action in any_paths.items() for plant in PLANTS]
    cases += [(path, action, plant, saved_by) for path, action in own_paths.items() for plant in PLANTS]
    out: dict[str, str] = {}
    for number, (path, action, plant, source) in enumerate(cases):
        folder, marker = shared.scratch / str(number), shared.scratch / f"ran{number}"
        shutil.copytree(shared.scratch.with_name(source), folder)
        inner = _within(folder)
        PLANTS[plant](inner, Touch(marker))
        if (inner / MANIFEST).is_file():  # an attacker can also write a matching manifest
            write_manifest(inner, read_manifest(shared.scratch.with_name(source) / inner.name))
        try:
            action(folder)
            outcome = "no error"
        except SlimeLikeError as error:
            outcome = f"{type(error).__name__}: {error}"
        out[f"{path}, {plant}"] = ("ran; " if marker.exists() else "") + outcome
        shutil.rmtree(folder)
    return out


def _within(folder: Path) -> Path:
    return cast("Path", megatron_folder(folder))
