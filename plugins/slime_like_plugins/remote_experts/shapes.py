"""Shapes of the remote experts of an engine's rank, sent to a worker as JSON, and the sizes of requests and replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from slime_like_plugins.remote_experts.frames import FrameError, RowType, dump_json, read_json

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_CAPACITY = 4096
MAX_SIZE = 1 << 24  # of a dimension
WRITE_BYTES = 32 << 20  # maximum size of a piece of a matrix
PAIR_BYTES = 8  # int32 id and float32 weight of a selected expert


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """Shapes of the remote experts of one rank."""

    layers: tuple[int, ...]
    num_experts: tuple[int, ...]  # remote experts of each of these layers
    hidden: int
    intermediate: int
    dtype: str  # dtype of the weights, a key of DTYPES
    capacity: int  # maximum rows of a request
    max_selected: int  # maximum experts of a row

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return DTYPES[self.dtype]

    @property
    def max_request(self) -> int:
        """Largest payload of a request or reply in bytes."""
        return self.capacity * (self.hidden * RowType.float32.itemsize + self.max_selected * PAIR_BYTES)

    @property
    def row_bytes(self) -> Mapping[str, int]:
        """Bytes per row of each matrix, by name."""
        size = self.torch_dtype.itemsize
        return {"w13": self.hidden * size, "w2": self.intermediate * size}

    @property
    def max_payload(self) -> int:
        """Largest payload of a frame in bytes."""
        return max(self.max_request, WRITE_BYTES, *self.row_bytes.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return 3 * sum(self.num_experts) * self.intermediate * self.hidden * self.torch_dtype.itemsize

    def to_json(self) -> bytes:
        """Return the JSON of a HELLO frame."""
        return dump_json(asdict(self))


def shapes_from_json(data: bytes) -> ExpertShapes:
    """Return the shapes that ``to_json`` wrote. Raises ``FrameError`` if they are not valid shapes of experts."""
    counts = ("hidden", "intermediate", "capacity", "max_selected")
    types: dict[str, type | tuple[type, ...]] = {"layers": (list, int), "num_experts": (list, int), "dtype": str}
    fields = read_json(data, types | dict.fromkeys(counts, int))
    fields["layers"], fields["num_experts"] = tuple(fields["layers"]), tuple(fields["num_experts"])
    shapes = ExpertShapes(**fields)
    positive = min(*(fields[name] for name in counts), *shapes.num_experts, 1) >= 1
    if not positive or len(shapes.layers) != len(shapes.num_experts) or len({*shapes.layers}) < len(shapes.layers):
        raise FrameError(f"shapes of remote experts are not positive, or do not fit together: {shapes}")
    if (largest := max(*(fields[name] for name in counts), *shapes.num_experts)) > MAX_SIZE:
        raise FrameError(f"shapes of remote experts have a size of {largest}, above {MAX_SIZE}")
    if shapes.dtype not in DTYPES:
        raise FrameError(f"dtype {shapes.dtype} of remote experts is not one of {', '.join(DTYPES)}")
    if shapes.capacity > MAX_CAPACITY:
        raise FrameError(f"capacity {shapes.capacity} of remote experts is above {MAX_CAPACITY}")
    return shapes


def request_bytes(num_rows: int, num_selected: int, hidden: int, row_type: RowType) -> int:
    """Return the payload bytes of a request: rows, ids and weights."""
    return num_rows * (hidden * row_type.itemsize + num_selected * PAIR_BYTES)


def reply_bytes(num_rows: int, hidden: int, row_type: RowType) -> int:
    """Return the payload bytes of a reply, which has only rows."""
    return num_rows * hidden * row_type.itemsize
