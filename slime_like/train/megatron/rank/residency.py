"""Offloading of parts of a rank's state (weights, gradients, optimizer state) from its device to host memory and back.

Storages are resized, not replaced, so all views of them stay valid: megatron's buckets, parameters, the optimizer's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slime_like.config.schema.residency import GRADIENTS, OPTIMIZER, TRAINER_PARTS, WEIGHTS
from slime_like.train.megatron.model_io.host_weights import CHUNK_BYTES, copy_from_host, copy_to_host

if TYPE_CHECKING:
    from slime_like.train.megatron.model.model import ModelSegments

type Tensors = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class OffloadedStorage:
    """A storage whose memory on the device has been released, and the size of that memory."""

    key: str
    storage: torch.UntypedStorage
    num_bytes: int


class DeviceState:
    """Storages of a rank by part, each on the device or in host memory.

    A storage that two parts share, such as float32 weights that are also the optimizer's, belongs to the first. Gradients are
    not copied, because every optimizer step begins by setting them to 0. A CPU storage whose memory NumPy shares cannot be
    resized and is not moved. If ``keep`` raises while it brings a part back, all of that part stays in host memory, and a
    repeated call continues with it.
    """

    def __init__(self, tensors: Mapping[str, Tensors], device: torch.device) -> None:
        """Track the tensors on ``device``. ``tensors`` has a function for each part, which returns the part's tensors."""
        self._tensors = tensors
        self._device = device
        self._offloaded: dict[str, list[OffloadedStorage]] = {part: [] for part in TRAINER_PARTS}
        self._copies: dict[str, dict[str, Tensor]] = {}  # host copies of each part, pinned if the device is a GPU

    @property
    def resident(self) -> tuple[str, ...]:
        """Parts of which no storage is offloaded."""
        return tuple(part for part in TRAINER_PARTS if not self._offloaded[part])

    def keep(self, parts: Collection[str]) -> None:
        """Move all parts except ``parts`` to host memory, then bring back those of ``parts`` that are off the device."""
        parts_to_offload = [part for part in self.resident if part not in parts]
        storages = self._storages() if parts_to_offload else {}
        for part in parts_to_offload:
            self._offload(part, storages[part])
        if parts_to_offload:
            self._return_memory()
        for part in TRAINER_PARTS:
            if part in parts:
                self._restore(part)

    def _return_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine, which shares the GPU

    def num_bytes(self, part: str) -> int:
        """Return how many bytes of a part are on the device."""
        return sum(storage.nbytes() for storage in self._storages()[part])

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """Return, by part, the storages that are on the device. A storage of several parts is listed only under the first."""
        addresses: set[int] = set()
        out: dict[str, list[torch.UntypedStorage]] = {}
        for part in TRAINER_PARTS:
            storages = [t.untyped_storage() for t in self._tensors[part]() if t.device.type == self._device.type]
            by_address = {s.data_ptr(): s for s in storages if s.resizable() and s.data_ptr() not in addresses}
            by_address.pop(0, None)  # without memory
            addresses |= by_address.keys()
            out[part] = list(by_address.values())
        return out

    def _offload(self, part: str, storages: list[torch.UntypedStorage]) -> None:
        storages_by_key = [(str(index), storage) for index, storage in enumerate(storages)]
        if part != GRADIENTS:
            pieces = [piece for key, storage in storages_by_key for piece in _pieces(key, storage)]
            sizes = {key: piece.numel() for key, piece in pieces}
            if {key: copy.numel() for key, copy in self._copies.get(part, {}).items()} != sizes:
                self._copies.pop(part, None)  # the optimizer's state grows at its first step
            self._copies[part] = copy_to_host(pieces, self._copies.get(part))
        for key, storage in storages_by_key:
            self._offloaded[part].append(OffloadedStorage(key, storage, storage.nbytes()))
            storage.resize_(0)

    def _restore(self, part: str) -> None:
        entries = self._offloaded[part]
        try:
            for entry in entries:
                entry.storage.resize_(entry.num_bytes)
                if part == GRADIENTS:
                    _bytes(entry.storage).zero_()
                else:
                    copy_from_host(_pieces(entry.key, entry.storage), self._copies[part])
        except BaseException:
            for entry in entries:
                entry.storage.resize_(0)
            self._return_memory()
            raise
        entries.clear()
        if self._device.type != "cuda":  # pinned memory is kept, because pinning is slow
            self._copies.pop(part, None)


def trained_state(wrapped: ModelSegments, optimizer: Any, device: torch.device) -> DeviceState:
    """Return the ``DeviceState`` of a rank that is trained, with megatron's gradient buffers and optimizer."""

    def gradients() -> Iterator[Tensor]:
        segments: list[Any] = list(wrapped)  # megatron's DistributedDataParallel
        for segment in segments:
            for buffer in (*segment.buffers, *segment.expert_parallel_buffers):
                yield buffer.grad_data

    return DeviceState(
        {
            WEIGHTS: lambda: [parameter.data for parameter in wrapped.parameters()],
            GRADIENTS: gradients,
            OPTIMIZER: lambda: _optimizer_tensors(optimizer),
        },
        device,
    )


def scoring_state(model: ModelSegments, device: torch.device) -> DeviceState:
    """Return the ``DeviceState`` of a rank that is not trained and has only weights."""
    parts: dict[str, Tensors] = {GRADIENTS: tuple, OPTIMIZER: tuple}
    return DeviceState({WEIGHTS: lambda: [parameter.data for parameter in model.parameters()], **parts}, device)


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of megatron's optimizer: parameters, main weights and moments, including those of nested optimizers."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(part, name, None) or ():
                yield from (tensor for tensor in group if tensor is not None)
        inner = getattr(part, "optimizer", None)
        if inner is None:  # a rank without parameters of this kind
            continue
        for torch_optimizer in (inner, *(getattr(inner, "sub_optimizers", None) or ())):
            yield from _torch_optimizer_tensors(torch_optimizer)


def _torch_optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    yield from getattr(optimizer, "param_to_fp32_param", {}).values()  # if the optimizer is partly in host memory


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(key: str, storage: torch.UntypedStorage) -> Iterator[tuple[str, Tensor]]:
    """Yield a storage as named tensors of at most ``CHUNK_BYTES``."""
    for index, piece in enumerate(_bytes(storage).split(CHUNK_BYTES)):
        yield f"{key}.{index}", piece
