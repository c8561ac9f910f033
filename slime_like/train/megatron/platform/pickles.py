"""Unpickling of a checkpoint folder's objects with an allow list, so that loading a folder cannot run code.

A ``torch_dist`` folder holds pickles in three places: ``.metadata``, the objects in ``.distcp`` files (RNG states,
``common_state``), and ``common.pt`` of earlier versions. torch and megatron-core unpickle the first two without restriction,
and ``common.pt`` with torch's default, which an environment variable can change. ``patches`` replaces the readers with
``CheckedReader`` and ``load_common``.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from traceback import StackSummary
from typing import Any, cast

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform.adamw import GroupStepAdamW

# Classes that torch and megatron-core write into .metadata: dataclasses, enums and sizes. Unpickling them runs no code.
ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}  # in planner_data of megatron-core up to 0.8
    ),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"MEM_FORMAT_ENCODING", "TensorProperties"}),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset({"MCoreMetadata", "MCoreSavePlan"}),
    "torch": frozenset({"Size"}),  # and dtypes
    "torch.serialization": frozenset({"_get_layout"}),  # a table lookup
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath"}),
}
# Optimizer classes that megatron's offloading optimizer stores.
OPTIMIZERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    torch.optim.Adam,
    torch.optim.AdamW,
    GroupStepAdamW,
]
GLOBAL = re.compile(r"GLOBAL (\S+)")  # in the error of torch's weights-only unpickler


class CheckedReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with checks of ``.metadata`` and of the objects in ``.distcp`` files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return ``.metadata``. Raises a ``CheckpointException`` that wraps the ``CheckpointError`` of ``load_metadata``.

        torch's loader treats any ``Exception`` here as a missing file; CheckpointException is a BaseException.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            metadata = load_metadata(path)
        except CheckpointError as error:
            raise CheckpointException("read metadata", {0: (error, StackSummary())}) from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read tensors and objects. Objects are read with ``load_object``, whose ``CheckpointError`` names the file."""
        return super().read_data(plan, cast("Any", _CheckedObjects(planner, self)))


class _CheckedObjects:
    """Load planner that checks objects with ``load_object`` before it passes them to ``planner``.

    torch's planners unpickle without restriction, so ``planner`` gets a new pickle of the checked object.
    """

    def __init__(self, planner: Any, reader: CheckedReader) -> None:
        self._planner = planner
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Check one object and pass it to the planner."""
        file: str = self._reader.storage_data[read_item.storage_index].relative_path
        copy = io.BytesIO()
        torch.save(load_object(value, Path(self._reader.path) / file), copy)
        copy.seek(0)
        self._planner.load_bytes(read_item, copy)


def load_metadata(path: Path) -> Metadata:
    """Return the metadata in ``path``, the ``.metadata`` of a folder.

    Raises ``CheckpointError`` if the file needs a class or function that is not in ``ALLOWED``, holds no ``Metadata``, or
    refers to data outside its folder. A missing or damaged file raises the errors of ``open`` and ``pickle``.
    """
    metadata = _MetadataUnpickler(path).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{path}: contains a {type(metadata).__name__}, not the metadata of a torch_dist checkpoint"
        )
    for info in (metadata.storage_data or {}).values():
        name = PurePosixPath(info.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(
                f"{path}: refers to data in {str(name)!r}, outside its folder; it was not read: get the checkpoint again, from "
                "a source you trust"
            )
    return metadata


def load_object(file: io.BytesIO | Path, path: Path) -> Any:
    """Load an object that ``torch.save`` wrote, with torch's weights-only unpickler, and allow the classes in ``OPTIMIZERS``.

    ``path`` is the file that holds the object, for the message. Raises ``CheckpointError`` if the object needs another class or
    function, which the error names. A damaged file raises the errors of ``torch.load``.
    """
    try:
        with torch.serialization.safe_globals(OPTIMIZERS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = GLOBAL.search(str(error))
        if refused is None:  # a damaged file
            raise
        raise CheckpointError(_refusal(path, refused[1])) from None


def load_common(checkpoint_dir: str | Path) -> Any:
    """Return the objects of a legacy ``common.pt``. Raises the errors of ``load_object``."""
    path = Path(checkpoint_dir) / "common.pt"
    return load_object(path, path)


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(_refusal(self._path, f"{module}.{name}"))


def _refusal(path: Path, name: str) -> str:
    return (
        f"{path}: its pickle needs {name}, which is not part of a checkpoint and could run code; it was not loaded: get the "
        "checkpoint again, from a source you trust"
    )
