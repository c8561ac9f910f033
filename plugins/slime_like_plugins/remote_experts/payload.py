"""Rows, ids and weights of requests and replies as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like_plugins.remote_experts.compute import Ids, Weights
from slime_like_plugins.remote_experts.frames import Header, RowType

TORCH_TYPES = {RowType.float32: torch.float32, RowType.float16: torch.float16, RowType.bfloat16: torch.bfloat16}


def encode_rows(rows_NH: Tensor, row_type: RowType) -> tuple[Tensor, RowType]:
    """Return contiguous rows on the CPU and their row type: ``row_type``, or float32 if a number would be infinite in float16.

    The result shares the memory of ``rows_NH`` if no conversion is needed.
    """
    rows = rows_NH.detach().to("cpu", TORCH_TYPES[row_type]).contiguous()
    if row_type is RowType.float16 and bool(torch.isinf(rows).any()):
        return rows_NH.detach().to("cpu", torch.float32).contiguous(), RowType.float32
    return rows, row_type


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def decode_rows(data: bytes | bytearray | memoryview, num_rows: int, hidden: int, row_type: RowType) -> Tensor:
    """Return rows [N, H] as a view of the bytes ``data``."""
    if not num_rows:
        return torch.empty((0, hidden), dtype=TORCH_TYPES[row_type])
    return torch.frombuffer(data, dtype=TORCH_TYPES[row_type], count=num_rows * hidden).view(num_rows, hidden)


def decode_request(data: memoryview, header: Header) -> tuple[Tensor, Ids, Weights]:
    """Return rows, ids and weights of a request as views of its bytes."""
    h = header
    shape, num_pairs = (h.num_rows, h.num_selected), h.num_rows * h.num_selected
    end = h.num_rows * h.hidden * h.row_type.itemsize
    rows = decode_rows(data, h.num_rows, h.hidden, h.row_type)
    ids = np.frombuffer(data, np.int32, num_pairs, end).reshape(shape)
    weights = np.frombuffer(data, np.float32, num_pairs, end + 4 * num_pairs).reshape(shape)
    return rows, ids, weights
