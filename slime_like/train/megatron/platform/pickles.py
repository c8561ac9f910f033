"""Unpickling of a checkpoint folder's objects with an allow list, so that loading a folder cannot run code.

A ``torch_dist`` folder holds pickles in three places: ``.metadata``, the objects in ``.distcp`` files (RNG states,
``common_state``), and ``common.pt`` of earlier versions. torch and megatron-core unpickle the first two without restriction,
and ``common.pt`` with torch's default, which an environment variable can change. ``patches`` replaces the readers with
``CheckedReader`` and ``load_common``.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from traceback import StackSummary
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

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
# A tensor's file slice of at most this size is read into memory at once; a checked object of at most this size is reused.
SMALL_BYTES = 1 << 20
GLOBAL = re.compile(r"GLOBAL (\S+)")  # in the error of torch's weights-only unpickler


class CheckedReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with checks of ``.metadata`` and of the objects in ``.distcp`` files.

    Tensors of at most ``SMALL_BYTES`` are loaded with ``TensorLoader``, which takes a tenth of torch's time.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the content of ``.metadata``. Raises ``load_metadata``'s ``CheckpointError`` inside a ``CheckpointException``.

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
        checked_planner = _CheckedObjects(planner, self)
        small_tensors, other_items = [], []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            is_small = (
                item.type == LoadItemType.TENSOR and info.length <= SMALL_BYTES and not info.transform_descriptors
            )
            (small_tensors if is_small else other_items).append((info, item))
        self._read_small_tensors(small_tensors, planner)
        return super().read_data(replace(plan, items=[item for _, item in other_items]), cast("Any", checked_planner))

    def _read_small_tensors(self, items: Sequence[tuple[Any, ReadItem]], planner: Any) -> None:
        """Copy saved tensors into those of ``planner``, as torch's ``read_data`` does. Raises ``ValueError`` if shapes differ."""
        loader = TensorLoader()
        in_file_order = sorted(items, key=lambda pair: (pair[0].relative_path, pair[0].offset))
        for name, of_file in itertools.groupby(in_file_order, key=lambda pair: pair[0].relative_path):
            with (Path(self.path) / name).open("rb") as file:
                for info, item in of_file:
                    file.seek(info.offset)
                    saved = loader.load(io.BytesIO(file.read(info.length)))
                    saved = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    if target.size() != saved.size():
                        raise ValueError(
                            f"{item.storage_index} has the shape {tuple(saved.size())}, not {tuple(target.size())}"
                        )
                    target.copy_(saved)
                    planner.commit_tensor(item, target)


class _CheckedObjects:
    """Load planner that checks objects with ``load_object`` before it passes them to ``planner``.

    torch's planners unpickle without restriction, so ``planner`` gets a new pickle of the checked object.
    """

    def __init__(self, planner: Any, reader: CheckedReader) -> None:
        self._planner = planner
        self._reader = reader
        # Pickle of an object -> pickle of its checked copy, because most objects are equal. Both have at most SMALL_BYTES.
        self._copies: dict[bytes, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Check one object and pass it to the planner."""
        file: str = self._reader.storage_data[read_item.storage_index].relative_path
        pickled = value.getvalue()
        copy = self._copies.get(pickled)
        if copy is None:
            buffer = io.BytesIO()
            torch.save(load_object(value, Path(self._reader.path) / file), buffer)
            copy = buffer.getvalue()
            if max(len(pickled), len(copy)) <= SMALL_BYTES:
                self._copies[pickled] = copy
        self._planner.load_bytes(read_item, io.BytesIO(copy))


class TensorLoader:
    """Loader of tensors that ``torch.save`` wrote, which unpickles equal pickles once.

    The pickle of a tensor contains dtype, shape and strides, but no values. A checkpoint has thousands of tensors with few
    different pickles, and ``torch.load`` takes 0.2 ms for each.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, _TensorLayout] = {}

    def load(self, file: io.BytesIO) -> Any:
        """Return ``torch.load(file, map_location="cpu", weights_only=True)``.

        Raises ``RuntimeError`` if the file is not a zip archive that contains a pickle, otherwise the errors of ``torch.load``.
        """
        archive: Any = torch._C.PyTorchFileReader(file)  # pyright: ignore[reportPrivateUsage]  no public class reads records
        pickled = archive.get_record("data.pkl")
        is_plain = archive.has_record("byteorder") and archive.get_record("byteorder") == sys.byteorder.encode()
        layout = self._layouts.get(pickled) if is_plain else None
        if layout is not None:
            storage = archive.get_storage_from_record(
                "data/0", layout.num_bytes, torch.UntypedStorage
            ).untyped_storage()
            return torch.empty(0, dtype=layout.dtype).set_(storage, layout.offset, layout.shape, layout.strides)
        file.seek(0)
        tensor = torch.load(file, map_location="cpu", weights_only=True)
        # If data/0 is the only storage, a pickle that was loaded names no other, nor do equal pickles.
        is_plain = is_plain and [r for r in archive.get_all_records() if r.startswith("data/")] == ["data/0"]
        if is_plain and type(tensor) is Tensor and _is_plain(tensor):
            num_bytes = tensor.untyped_storage().nbytes()
            self._layouts[pickled] = _TensorLayout(
                tensor.dtype, num_bytes, int(tensor.storage_offset()), tensor.size(), tensor.stride()
            )
        return tensor


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    dtype: torch.dtype
    num_bytes: int  # of the storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether dtype, shape and strides describe the tensor completely."""
    properties = (tensor.requires_grad, tensor.is_quantized, tensor.is_conj(), tensor.is_neg(), bool(vars(tensor)))
    return tensor.layout == torch.strided and not any(properties)


def load_metadata(path: Path) -> Metadata:
    """Return the metadata in ``path``, the ``.metadata`` of a folder.

    Raises ``CheckpointError`` if the file needs a class or function that is not in ``ALLOWED``, holds no ``Metadata``, or
    refers to data outside its folder or with a negative offset or size. A missing or damaged file raises the errors of ``open``
    and ``pickle``.
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
        if info.offset < 0 or info.length < 0:
            raise CheckpointError(
                f"{path}: refers to {info.length} bytes at offset {info.offset} of {str(name)!r}; it was not read: get the "
                "checkpoint again, from a source you trust"
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
