"""Objects and tensors in a checkpoint: classes of optimizers, tensors with equal pickles, and the reader of a folder."""

from __future__ import annotations

import io
import pathlib
import pickle
import zipfile
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform import pickles
from slime_like.train.megatron.platform.adamw import GroupStepAdamW
from slime_like.train.megatron.platform.pickles import CheckedReader, TensorLoader, load_metadata, load_object

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a save by one process

PATH = pathlib.Path("iter_0000001/__0_0.distcp")


def file_of(value: object) -> io.BytesIO:
    """Return the file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_the_class_of_an_optimizer_is_loaded() -> None:
    value = {"class": GroupStepAdamW, "step": 3}
    assert load_object(file_of(value), PATH) == value


def test_another_class_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: its pickle needs pathlib\.PurePath"):
        load_object(file_of({"class": pathlib.PurePath}), PATH)


TENSORS = {
    "vector": torch.arange(6.0),
    "same pickle": torch.arange(6.0) + 7,
    "same shape": torch.arange(6.0).bfloat16(),
    "columns": torch.arange(12.0).view(3, 4).T,
    "slice": torch.arange(12.0).view(3, 4)[1:, 2],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3, dtype=torch.int64),
    "expanded": torch.ones(1).expand(5),
    "gradient": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "conjugate": torch.complex(torch.ones(2), torch.arange(2.0)).conj(),
    "negative": torch.complex(torch.ones(2), torch.arange(2.0)).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_tensors_are_loaded_as_torch_loads_them() -> None:
    loader = TensorLoader()
    for _ in range(3):  # the second and third time with the pickles of the first
        for name, tensor in TENSORS.items():
            actual, expected = loader.load(file_of(tensor)), torch.load(file_of(tensor), weights_only=True)
            assert type(actual) is type(expected), name
            for value in ("dtype", "shape", "layout", "requires_grad", "device"):
                assert getattr(actual, value) == getattr(expected, value), name
            assert (actual.is_conj(), actual.is_neg()) == (expected.is_conj(), expected.is_neg()), name
            assert torch.equal(actual.to_dense(), expected.to_dense()), name
            if actual.layout == torch.strided:
                assert (actual.stride(), actual.storage_offset()) == (expected.stride(), expected.storage_offset()), (
                    name
                )
                assert actual.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), name


def test_loaded_tensors_share_no_memory() -> None:
    loader = TensorLoader()
    first, second = (loader.load(file_of(torch.zeros(4))) for _ in range(2))
    first += 1
    assert torch.equal(second, torch.zeros(4)) and torch.equal(loader.load(file_of(torch.zeros(4))), torch.zeros(4))


def test_a_file_that_is_no_tensor_is_refused_after_tensors() -> None:
    loader = TensorLoader()
    for _ in range(2):
        loader.load(file_of(torch.zeros(4)))
        with pytest.raises(pickle.UnpicklingError, match="PurePath"):
            loader.load(file_of({"class": pathlib.PurePath}))


@pytest.mark.parametrize("length", [0, 100, 600, -50])
def test_a_cut_file_of_a_known_tensor_is_refused(length: int) -> None:
    loader, content = TensorLoader(), file_of(torch.zeros(4)).getvalue()
    loader.load(io.BytesIO(content))
    with pytest.raises(RuntimeError):
        loader.load(io.BytesIO(content[:length]))


def archive_of(pickled: bytes, storages: dict[str, torch.Tensor]) -> io.BytesIO:
    """Return an archive with this pickle and the storages ``data/<key>``."""
    file = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(file)  # pyright: ignore[reportPrivateUsage]
    storage_bytes = {f"data/{key}": tensor.numpy().tobytes() for key, tensor in storages.items()}
    for name, content in {"data.pkl": pickled, "byteorder": b"little", **storage_bytes}.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return io.BytesIO(file.getvalue())


def test_the_storage_that_the_pickle_names_is_loaded() -> None:
    pickled = zipfile.ZipFile(file_of(torch.zeros(4))).read("archive/data.pkl")
    key = pickle.BINUNICODE + (1).to_bytes(4, "little")
    assert pickled.count(key + b"0") == 1
    loader, storages = TensorLoader(), {"0": torch.zeros(4), "1": torch.arange(4.0)}
    for name in ("1", "0"):
        content = archive_of(pickled.replace(key + b"0", key + name.encode()), storages).getvalue()
        for _ in range(2):
            assert torch.equal(loader.load(io.BytesIO(content)), storages[name]), name


class FixedPlanner:
    """Load planner that gives ``targets`` to the reader and keeps the objects that it gets."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self.targets = targets
        self.objects: dict[str, object] = {}
        self.committed: list[str] = []

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.dest_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.data_ptr() == self.resolve_tensor(item).data_ptr()
        self.committed.append(item.dest_index.fqn)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.objects[item.dest_index.fqn] = torch.load(value, weights_only=True)


def item_of(name: str, kind: LoadItemType, offsets: tuple[int, ...] = (), lengths: tuple[int, ...] = ()) -> ReadItem:
    """Return the request for a slice of a saved tensor, or for an object."""
    index = MetadataIndex(name, torch.Size(0 for _ in offsets) if kind is LoadItemType.TENSOR else None)
    return ReadItem(kind, index, torch.Size(offsets), index, torch.Size(offsets), torch.Size(lengths))


def read(folder: pathlib.Path, items: list[ReadItem], **targets: torch.Tensor) -> FixedPlanner:
    """Read ``items`` with ``CheckedReader`` and return the planner that got them."""
    reader, planner = CheckedReader(folder), FixedPlanner(targets)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    reader.read_data(LoadPlan(items), planner).wait()
    return planner


def save(folder: pathlib.Path, state: dict[str, Any]) -> None:
    """Write a ``torch_dist`` folder."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("small_bytes", [pickles.SMALL_BYTES, 0])
def test_slices_of_saved_tensors_are_copied(
    small_bytes: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "SMALL_BYTES", small_bytes)
    saved = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0).view(4, 6) + 100, "c": torch.arange(5)}
    save(tmp_path, saved)
    items = [
        item_of("c", LoadItemType.TENSOR, (3,), (2,)),
        item_of("b", LoadItemType.TENSOR, (1, 2), (2, 3)),
        item_of("a", LoadItemType.TENSOR, (0, 0), (4, 6)),
    ]
    targets = {
        "a": torch.zeros(4, 6, requires_grad=True),
        "b": torch.zeros(2, 3),
        "c": torch.zeros(2, dtype=torch.int64),
    }
    planner = read(tmp_path, items, **targets)
    assert torch.equal(targets["a"], saved["a"]) and targets["a"].requires_grad
    assert torch.equal(targets["b"], saved["b"][1:3, 2:5]) and torch.equal(targets["c"], saved["c"][3:])
    assert sorted(planner.committed) == ["a", "b", "c"]


def test_a_tensor_of_another_shape_is_refused(tmp_path: pathlib.Path) -> None:
    save(tmp_path, {"a": torch.zeros(4, 6)})
    with pytest.raises(ValueError, match=r"'a'.* has the shape \(2, 3\), not \(3, 2\)"):
        read(tmp_path, [item_of("a", LoadItemType.TENSOR, (1, 2), (2, 3))], a=torch.zeros(3, 2))


@pytest.mark.parametrize(("small_bytes", "num_checks"), [(pickles.SMALL_BYTES, 2), (0, 3)])
def test_equal_small_objects_are_checked_once(
    small_bytes: int, num_checks: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []

    def check(file: Any, path: pathlib.Path) -> object:
        checked.append(load_object(file, path))
        return checked[-1]

    monkeypatch.setattr(pickles, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(pickles, "load_object", check)
    state = {"first": [1, 2], "second": [1, 2], "third": [3]}
    save(tmp_path, state)
    planner = read(tmp_path, [item_of(name, LoadItemType.BYTE_IO) for name in state])
    assert planner.objects == state and planner.objects["first"] is not planner.objects["second"]
    assert len(checked) == num_checks


@pytest.mark.parametrize("change", [{"length": -1}, {"offset": -1}])
def test_metadata_with_a_negative_size_is_refused(change: dict[str, int], tmp_path: pathlib.Path) -> None:
    save(tmp_path, {"a": torch.zeros(4)})
    path = tmp_path / ".metadata"
    metadata = load_metadata(path)
    ((index, info),) = metadata.storage_data.items()  # pyright: ignore[reportOptionalMemberAccess]
    metadata.storage_data = {index: replace(info, **change)}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: refers to -?\d+ bytes at offset -?\d+ of '__0_0\.distcp'"):
        load_metadata(path)
